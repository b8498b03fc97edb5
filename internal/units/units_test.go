package units

import "testing"

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{
		-1: "-1 bytes", 0: "0 bytes", 1023: "1023 bytes", 1 << 10: "1 KiB", 8 << 20: "8 MiB", 3 << 29: "1.5 GiB",
		1<<30 + 1: "1 GiB", 100 << 40: "100 TiB", 1<<20 + 100<<10: "1.1 MiB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
