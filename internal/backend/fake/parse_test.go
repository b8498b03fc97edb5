package fake

import "testing"

func FuzzParse(f *testing.F) {
	for _, s := range []string{"echo a && b || c; d | e &", `A="x $B ${C}" echo '$D' $(pwd) >f 2>&1 <g`, "echo \\", "'", "$(", "a &&\n b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		list, err := parse(s)
		if err != nil {
			return
		}
		for _, p := range list {
			if len(p.commands) == 0 {
				t.Errorf("%q has a pipeline of nothing", s)
			}
		}
	})
}
