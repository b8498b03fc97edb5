package convert

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
)

// What a configuration may say. It is data: LD_PRELOAD and PATH pass. (S100)
func TestConfig(t *testing.T) {
	many := make([]string, 5000)
	for i := range many {
		many[i] = "A=b"
	}
	ports := map[string]struct{}{}
	for range 10000 {
		ports[strings.Repeat("1", len(ports)%5+1)+"/tcp"] = struct{}{}
	}
	for _, tc := range []struct {
		name  string
		in    v1.Config
		want  Config
		field string // at fault; empty: accepted as want
	}{
		{name: "empty"},
		{name: "preload", in: v1.Config{Env: []string{"LD_PRELOAD=/evil.so", "PATH=", "X==", "A=b=c\nd"}}, want: Config{Env: []string{"LD_PRELOAD=/evil.so", "PATH=", "X==", "A=b=c\nd"}}},
		{name: "ports and volumes mean nothing", in: v1.Config{ExposedPorts: ports, Volumes: map[string]struct{}{"/proc": {}, "/": {}}, StopSignal: "SIGKILL", Shell: []string{"/x"}}},
		{name: "env without =", in: v1.Config{Env: []string{"A=b", "PATH"}}, field: "config.Env[1]"},
		{name: "env without name", in: v1.Config{Env: []string{"=b"}}, field: "config.Env[0]"},
		{name: "env with NUL", in: v1.Config{Env: []string{"A=b\x00c"}}, field: "config.Env[0]"},
		{name: "env too long", in: v1.Config{Env: []string{"A=" + strings.Repeat("b", 200<<10)}}, field: "config.Env[0]"},
		{name: "env too many", in: v1.Config{Env: many}, field: "config.Env"},
		{name: "too much together", in: v1.Config{Cmd: strings.Split(strings.Repeat(strings.Repeat("c", 100<<10)+" ", 11), " ")}, field: "config.Cmd[10]"},
		{name: "entrypoint with NUL", in: v1.Config{Entrypoint: []string{"/bin/sh", "a\x00"}}, field: "config.Entrypoint[1]"},

		{name: "workdir", in: v1.Config{WorkingDir: "/app/src"}, want: Config{Workdir: "/app/src"}},
		{name: "workdir with slash", in: v1.Config{WorkingDir: "/app//"}, want: Config{Workdir: "/app"}},
		{name: "root as workdir", in: v1.Config{WorkingDir: "/"}, want: Config{Workdir: "/"}},
		{name: "workdir named like proc", in: v1.Config{WorkingDir: "/process"}, want: Config{Workdir: "/process"}},
		{name: "workdir in proc", in: v1.Config{WorkingDir: "/proc/self/fd/8"}, field: "config.WorkingDir"},
		{name: "workdir to proc", in: v1.Config{WorkingDir: "/app/../proc/self/fd/8"}, field: "config.WorkingDir"},
		{name: "workdir by slashes", in: v1.Config{WorkingDir: "//proc/self"}, field: "config.WorkingDir"},
		{name: "workdir in dev", in: v1.Config{WorkingDir: "/dev/fd"}, field: "config.WorkingDir"},
		{name: "workdir relative", in: v1.Config{WorkingDir: "app"}, field: "config.WorkingDir"},
		{name: "workdir with NUL", in: v1.Config{WorkingDir: "/a\x00b"}, field: "config.WorkingDir"},
		{name: "workdir too long", in: v1.Config{WorkingDir: "/" + strings.Repeat("a/", 2100) + "b"}, field: "config.WorkingDir"},

		{name: "user", in: v1.Config{User: "nobody"}, want: Config{User: "nobody"}},
		{name: "user and group", in: v1.Config{User: "1000:users"}, want: Config{User: "1000:users"}},
		{name: "largest user", in: v1.Config{User: "4294967294"}, want: Config{User: "4294967294"}},
		{name: "user of minus one", in: v1.Config{User: "4294967295"}, field: "config.User"},
		{name: "user beyond", in: v1.Config{User: "99999999999999999999"}, field: "config.User"},
		{name: "negative user", in: v1.Config{User: "-1"}, field: "config.User"},
		{name: "negative group", in: v1.Config{User: "0:-5"}, field: "config.User"},
		{name: "two colons", in: v1.Config{User: "a:b:c"}, field: "config.User"},
		{name: "no user", in: v1.Config{User: ":0"}, field: "config.User"},
		{name: "no group", in: v1.Config{User: "a:"}, field: "config.User"},
		{name: "user with NUL", in: v1.Config{User: "root\x00x"}, field: "config.User"},
		{name: "user with newline", in: v1.Config{User: "a\nroot"}, field: "config.User"},
		{name: "user with slash", in: v1.Config{User: "../a"}, field: "config.User"},
		{name: "user not UTF-8", in: v1.Config{User: "a\xff"}, field: "config.User"},
		{name: "user too long", in: v1.Config{User: strings.Repeat("u", 300)}, field: "config.User"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := newConfig(tc.in)
			if tc.field != "" {
				e, ok := err.(*dsec.Error)
				if !ok || e.Code != dsec.CodeInvalid || e.Field != tc.field {
					t.Errorf("%v, want invalid %s", err, tc.field)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}
