package main

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

func TestDefaultsAreValid(t *testing.T) {
	var c Config
	if err := decode(defaultConfig, &c); err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if c.API.Listen != "127.0.0.1:7321" || c.Edge.DefaultIdleTimeout.Duration != time.Hour {
		t.Errorf("%+v", c)
	}
}

func TestFileThenEnvironment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dsec.toml")
	if err := os.WriteFile(path, []byte("[edge]\nmax_sandboxes = 7\nmax_calls = 8\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DSEC_EDGE_MAX_CALLS", "9")
	t.Setenv("DSEC_EDGE_BACKENDS", "fake, container")
	t.Setenv("DSEC_EDGE_DEFAULT_LIMITS_PIDS", "3")
	c, err := loadConfig(path, true)
	if err != nil {
		t.Fatal(err)
	}
	if c.Edge.MaxSandboxes != 7 || c.Edge.MaxCalls != 9 || len(c.Edge.Backends) != 2 || c.Edge.DefaultLimits.Pids != 3 {
		t.Errorf("%+v", c.Edge)
	}
}

func TestValidateNamesTheField(t *testing.T) {
	for field, change := range map[string]func(*Config){
		"data_dir":                      func(c *Config) { c.DataDir = "x" },
		"api.listen":                    func(c *Config) { c.API.Listen = "[::]:1" },
		"api.webhook_allow[0]":          func(c *Config) { c.API.WebhookAllow = []string{"10.0.0.1"} },
		"api.webhook_give_up":           func(c *Config) { c.API.WebhookGiveUp.Duration = 0 },
		"api.tls_cert":                  func(c *Config) { c.API.TLSCert = "x" },
		"edge.backends":                 func(c *Config) { c.Edge.Backends = nil },
		"edge.max_sandboxes":            func(c *Config) { c.Edge.MaxSandboxes = -1 },
		"edge.default_idle_timeout":     func(c *Config) { c.Edge.DefaultIdleTimeout = duration{-time.Millisecond} },
		"layers.store":                  func(c *Config) { c.Layers.Store = "s3://bucket?endpiont=x" },
		"layers.store_credentials":      func(c *Config) { c.Layers.StoreCredentials = "keys" },
		"layers.store_requests":         func(c *Config) { c.Layers.StoreRequests = 0 },
		"container.ready":               func(c *Config) { c.Container.Ready = 0 },
		"container.disk_share":          func(c *Config) { c.Container.DiskShare = 101 },
		"container.disk_driver":         func(c *Config) { c.Container.DiskDriver = "floppy" },
		"container.cgroup":              func(c *Config) { c.Container.Cgroup = "../x" },
		"edge.max_limits.pids":          func(c *Config) { c.Edge.MaxLimits.Pids = 0 },
		"edge.default_limits.milli_cpu": func(c *Config) { c.Edge.DefaultLimits.MilliCPU = math.MaxInt64 },
	} {
		var c Config
		if err := decode(defaultConfig, &c); err != nil {
			t.Fatal(err)
		}
		change(&c)
		err := c.Validate()
		if err == nil || !strings.HasPrefix(err.Error(), field+": ") || dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestWrongValues: a value of the wrong type or form is refused with its key and
// what would do, from the file and from the environment.
func TestWrongValues(t *testing.T) {
	for line, want := range map[string]string{
		"default_idle_timeout = 60":       `edge.default_idle_timeout: want a duration with a unit; for 60 seconds write "60s"`,
		"default_max_lifetime = 0":        `write "0s"`,
		"retention = 1.5":                 `edge.retention: want a duration with a unit`,
		`retention = "60"`:                `write "60s"`,
		`retention = "-1ms"`:              `want a duration of 0s or more`,
		`retention = "soon"`:              `"soon": want a number with a unit`,
		"retention = 07:32:00":            `edge.retention: want a duration such as "90s", not one of TOML's type local time`,
		`max_sandboxes = "7"`:             `edge.max_sandboxes: want a whole number without quotes, not one of TOML's type string`,
		`max_sandboxes = 7.5`:             `edge.max_sandboxes: want a whole number`,
		`default_limits.pids = "many"`:    `edge.default_limits.pids: want a whole number`,
		`metrics_listen = 7322`:           `edge.metrics_listen: want a string in quotes, not one of TOML's type integer`,
		`backends = 1`:                    `edge.backends: want a list such as ["a", "b"], not one of TOML's type integer`,
		`backends = "container"`:          `edge.backends: want a list such as ["a", "b"], not one of TOML's type string`,
		`default_limits = 3`:              `edge.default_limits: want a section`,
		"max_calls = 1\nmax_sandboxes = ": `line 3`,
	} {
		path := filepath.Join(t.TempDir(), "dsec.toml")
		if err := os.WriteFile(path, []byte("[edge]\n"+line+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := loadConfig(path, true)
		if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), path+": ") {
			t.Errorf("%s: %v, want %s", line, err, want)
		}
	}
	none := filepath.Join(t.TempDir(), "dsec.toml")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct{ name, value, want string }{
		{"DSEC_EDGE_DEFAULT_IDLE_TIMEOUT", "60", `want a duration with a unit; for 60 seconds write "60s"`},
		{"DSEC_EDGE_RETENTION", "-5m", "want a duration of 0s or more"},
		{"DSEC_CONTAINER_DISK_IMAGE_BYTES", "1G", `"1G": want a whole number; for 1G bytes write 1073741824`},
		{"DSEC_EDGE_MAX_CALLS", "", `"": want a whole number`},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Setenv(v.name, v.value)
			var e *dsec.Error
			if _, err := loadConfig(none, true); !errors.As(err, &e) || e.Code != dsec.CodeInvalid || e.Field != v.name || !strings.Contains(e.Message, v.want) {
				t.Errorf("%v, want %s", err, v.want)
			}
		})
	}
	t.Setenv("DSEC_EDGE_DEFAULT_IDLE_TIMEOUT", "90s")
	if c, err := loadConfig(none, true); err != nil || c.Edge.DefaultIdleTimeout.Duration != 90*time.Second {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{
		"4096": 4096, "1K": 1 << 10, "512M": 512 << 20, "1.5G": 3 << 29, "2GiB": 2 << 30, "1t": 1 << 40, "0": 0,
		"": -1, "G": -1, "-1": -1, "1X": -1, "NaN": -1, "Inf": -1, "1e30": -1, "1 G": 1 << 30, "1.5 GiB": 3 << 29, " ": -1, "99999999T": -1,
	} {
		got, err := parseSize(text)
		if (err == nil) != (want >= 0) || err == nil && got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}

func FuzzSize(f *testing.F) {
	f.Add("1.5G")
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && n < 0 {
			t.Errorf("%q is %d", s, n)
		}
	})
}

func TestEveryCommandIsComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range commands() {
		if seen[c.name] || c.run == nil || !c.hidden && c.short == "" {
			t.Errorf("%+v", c)
		}
		seen[c.name] = true
	}
	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range seen {
		verb := name[strings.LastIndexByte(name, ' ')+1:]
		if name != "launcher" && name != "import-helper" && name != "scrub-reader" && !strings.Contains(string(text), verb) {
			t.Errorf("docs/cli.md does not tell of %q", name)
		}
	}
}

func TestUnknownVariables(t *testing.T) {
	t.Setenv("DSEC_TEST_BACKEND", "x")
	t.Setenv("DSEC_URL", "http://127.0.0.1:1")
	none := filepath.Join(t.TempDir(), "dsec.toml")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	load := func(name string, strict bool) error {
		t.Helper()
		t.Setenv(name, "1")
		_, err := loadConfig(none, strict)
		if uerr := os.Unsetenv(name); uerr != nil { // t would keep it to its end
			t.Fatal(uerr)
		}
		return err
	}
	for name, nearest := range map[string]string{
		"DSEC_EDGE_MAX_SANBOXES": "DSEC_EDGE_MAX_SANDBOXES", "DSEC_EDGE_MAXCALLS": "DSEC_EDGE_MAX_CALLS", "DSEC_URLS": "DSEC_URL", "DSEC_APIKEY": "DSEC_API_KEY",
	} {
		for _, strict := range []bool{true, false} {
			var e *dsec.Error
			if err := load(name, strict); !errors.As(err, &e) || e.Code != dsec.CodeInvalid || e.Field != name || !strings.Contains(e.Message, nearest+" meant") {
				t.Errorf("%s: %v, want %s", name, err, nearest)
			}
		}
	}
	if err := load("DSEC_MY_OWN_SANDBOX", true); err == nil {
		t.Error("a server takes a variable that does nothing")
	}
	if err := load("DSEC_MY_OWN_SANDBOX", false); err != nil {
		t.Errorf("a client refuses a variable that is not its own: %v", err)
	}
}
