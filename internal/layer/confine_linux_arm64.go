package layer

// auditArch is AUDIT_ARCH_AARCH64.
const auditArch = 0xc00000b7
