package layer

// auditArch is AUDIT_ARCH_X86_64.
const auditArch = 0xc000003e
