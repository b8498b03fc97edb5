package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/trajectory"
)

const (
	defaultConfigFile = "/etc/dsec/dsec.toml"
	defaultDataDir    = "/var/lib/dsec" // as in dsec.toml
)

// defaultConfig is the manual and the defaults at once.
//
//go:embed dsec.toml
var defaultConfig []byte

// Config is dsec.toml, which says what each key means.
type Config struct {
	DataDir   string          `toml:"data_dir"`
	RunDir    string          `toml:"run_dir"`
	LogLevel  string          `toml:"log_level"`
	API       APIConfig       `toml:"api"`
	Etcd      EtcdConfig      `toml:"etcd"`
	Edge      EdgeConfig      `toml:"edge"`
	Layers    LayersConfig    `toml:"layers"`
	Container ContainerConfig `toml:"container"`
	Registry  RegistryConfig  `toml:"registry"`
}

// APIConfig is the section [api].
type APIConfig struct {
	Listen  string   `toml:"listen"`
	TLSCert string   `toml:"tls_cert"`
	TLSKey  string   `toml:"tls_key"`
	Edges   []string `toml:"edges"`
	// WebhookAllow are networks, as 10.0.0.0/8.
	WebhookAllow  []string `toml:"webhook_allow"`
	WebhookGiveUp duration `toml:"webhook_give_up"`
}

// EtcdConfig is the section [etcd].
type EtcdConfig struct {
	Endpoints []string `toml:"endpoints"`
}

// EdgeConfig is the section [edge].
type EdgeConfig struct {
	Backends           []string   `toml:"backends"`
	MetricsListen      string     `toml:"metrics_listen"`
	MaxSandboxes       int64      `toml:"max_sandboxes"`
	MaxCalls           int64      `toml:"max_calls"`
	CreateConcurrency  int64      `toml:"create_concurrency"`
	DefaultIdleTimeout duration   `toml:"default_idle_timeout"`
	DefaultMaxLifetime duration   `toml:"default_max_lifetime"`
	DefaultMaxPaused   duration   `toml:"default_max_paused"`
	Retention          duration   `toml:"retention"`
	MinFreeBytes       int64      `toml:"min_free_bytes"`
	MinFreeInodes      int64      `toml:"min_free_inodes"`
	Trajectory         Trajectory `toml:"trajectory"`
	DefaultLimits      Limits     `toml:"default_limits"`
	MaxLimits          Limits     `toml:"max_limits"`
}

// ContainerConfig is the section [container].
type ContainerConfig struct {
	Warm           int64  `toml:"warm"`
	Ready          int64  `toml:"ready"`
	Cgroup         string `toml:"cgroup"`
	DiskDriver     string `toml:"disk_driver"`
	DiskImageBytes int64  `toml:"disk_image_bytes"`
	// DiskImageMaxBytes of 0 is no bound but what the disk below keeps free.
	DiskImageMaxBytes int64 `toml:"disk_image_max_bytes"`
	DiskShare         int64 `toml:"disk_share"`
}

// duration is written as Go writes one: 90s, 1h30m. It is a struct, for into an
// integer the TOML library would put the nanoseconds of `60`.
type duration struct{ time.Duration }

// UnmarshalText implements encoding.TextUnmarshaler. It is also asked for what is
// no string in the file.
func (d *duration) UnmarshalText(b []byte) error {
	var v time.Duration
	text := string(b)
	if _, err := strconv.ParseFloat(text, 64); err == nil { // time.ParseDuration would take 0
		return fmt.Errorf("want a duration with a unit; for %s seconds write \"%ss\"", text, text)
	}
	if err := (span{&v}).Set(text); err != nil {
		return fmt.Errorf("%q: %w", text, err)
	}
	if v < 0 {
		return fmt.Errorf("%q: want a duration of 0s or more", text)
	}
	d.Duration = v
	return nil
}

// instance is a name that no server with other data has.
func (c *Config) instance() string {
	if c.DataDir == defaultDataDir {
		return "dsec"
	}
	sum := sha256.Sum256([]byte(filepath.Clean(c.DataDir)))
	return "dsec-" + hex.EncodeToString(sum[:4])
}

// complete fills in what follows from other values.
func (c *Config) complete() {
	if c.RunDir == "" {
		c.RunDir = filepath.Join("/run", c.instance())
	}
}

func (c *Config) adminKey() string   { return filepath.Join(c.DataDir, "admin.key") }
func (c *Config) etcdDir() string    { return filepath.Join(c.DataDir, "etcd") }
func (c *Config) edgeSocket() string { return filepath.Join(c.RunDir, "edge.sock") }

// loadConfig reads the defaults, then the file, then the environment. path
// empty is the default file, which need not be there. strict refuses every
// variable that begins with DSEC_ and is not known.
func loadConfig(path string, strict bool) (*Config, error) {
	var c Config
	if err := decode(defaultConfig, &c); err != nil {
		return nil, err
	}
	file := path
	if file == "" {
		file = defaultConfigFile
	}
	data, err := os.ReadFile(file)
	switch {
	case err == nil:
		if err := decode(data, &c); err != nil {
			return nil, dsec.Invalid(file, "%v", err)
		}
	case path != "" || !errors.Is(err, fs.ErrNotExist):
		return nil, ofSystem("config", err)
	}
	names, err := fromEnv("DSEC", reflect.ValueOf(&c).Elem())
	if err != nil {
		return nil, err
	}
	return &c, checkEnv(os.Environ(), names, strict)
}

func decode(data []byte, c *Config) error {
	d := toml.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(c)
	if strict, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		first := strict.Errors[0]
		row, _ := first.Position()
		return fmt.Errorf("line %d: no such key: %s", row, strings.Join(first.Key(), "."))
	}
	if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
		row, _ := bad.Position()
		text := strings.TrimPrefix(bad.Error(), "toml: ")
		if got, ok := strings.CutPrefix(text, "cannot decode TOML "); ok { // the rest is of Go's types
			got, _, _ = strings.Cut(got, " into ")
			text = fmt.Sprintf("want %s, not one of TOML's type %s", wanted(reflect.TypeFor[Config](), bad.Key()), got)
		}
		if len(bad.Key()) > 0 {
			text = strings.Join(bad.Key(), ".") + ": " + text
		}
		return fmt.Errorf("line %d: %s", row, text)
	}
	if err != nil { // of a value without quotes for a duration the library tells no key
		var all map[string]any
		_ = toml.Unmarshal(data, &all)
		if key := bareDuration(reflect.TypeFor[Config](), all); key != nil {
			return fmt.Errorf("%s: %w", strings.Join(key, "."), err)
		}
	}
	return err
}

// bareDuration is the first key in all that is a duration of t and no string.
func bareDuration(t reflect.Type, all map[string]any) []string {
	for f := range t.Fields() {
		name := f.Tag.Get("toml")
		v, set := all[name]
		if below, ok := v.(map[string]any); ok && f.Type.Kind() == reflect.Struct {
			if key := bareDuration(f.Type, below); key != nil {
				return append([]string{name}, key...)
			}
		}
		if _, text := v.(string); set && !text && f.Type == reflect.TypeFor[duration]() {
			return []string{name}
		}
	}
	return nil
}

// wanted is what kind of value the file's key in t takes, for people.
func wanted(t reflect.Type, key []string) string {
	if len(key) > 0 && t.Kind() == reflect.Struct {
		for f := range t.Fields() {
			if f.Tag.Get("toml") == key[0] {
				return wanted(f.Type, key[1:])
			}
		}
	}
	switch t {
	case reflect.TypeFor[string]():
		return "a string in quotes"
	case reflect.TypeFor[int64]():
		return "a whole number without quotes"
	case reflect.TypeFor[duration]():
		return `a duration such as "90s"`
	case reflect.TypeFor[[]string]():
		return `a list such as ["a", "b"]`
	case reflect.TypeFor[bool]():
		return "true or false"
	}
	return "a section"
}

// fromEnv sets every field whose variable is in the environment, and returns the
// names of all that there could be.
func fromEnv(prefix string, v reflect.Value) (names []string, err error) {
	for i := range v.NumField() {
		name := prefix + "_" + strings.ToUpper(v.Type().Field(i).Tag.Get("toml"))
		f := v.Field(i)
		_, text := reflect.TypeAssert[encoding.TextUnmarshaler](f.Addr())
		if f.Kind() == reflect.Struct && !text {
			below, err := fromEnv(name, f)
			if err != nil {
				return nil, err
			}
			names = append(names, below...)
			continue
		}
		names = append(names, name)
		value, set := os.LookupEnv(name)
		if !set {
			continue
		}
		switch p := f.Addr().Interface().(type) {
		case *string:
			*p = value
		case *int64:
			*p, err = parseInt(value)
		case *duration:
			err = p.UnmarshalText([]byte(value))
		case *[]string:
			*p = splitList(value)
		case *bool:
			if *p, err = strconv.ParseBool(value); err != nil {
				err = fmt.Errorf("%q: want true or false", value)
			}
		case *map[string][]string:
			*p, err = splitPairs(value)
		}
		if err != nil {
			return nil, dsec.Invalid(name, "%v", err)
		}
	}
	return names, nil
}

// parseInt reads the value of a variable as the file would have it. Who wrote a
// size as flags take it is told what to write.
func parseInt(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err == nil {
		return n, nil
	}
	hint := ""
	if n, err := parseSize(text); err == nil {
		hint = fmt.Sprintf("; for %s bytes write %d", text, n)
	}
	return 0, fmt.Errorf("%q: want a whole number%s", text, hint)
}

// otherNames are variables that are of no key of the configuration: of clients,
// and of the tests and measurements that run this binary.
var (
	otherNames    = []string{"DSEC_URL", "DSEC_API_KEY", "DSEC_KEY_FILE", "DSEC_BACKEND", "DSEC_CRASH", "DSEC_LAUNCHER", "DSEC_BIN", "DSEC_BINARY", "DSEC_MUST", "DSEC_WITHOUT", "DSEC_LEDGER", "DSEC_IN_GUEST"}
	otherPrefixes = []string{"DSEC_TEST_", "DSEC_BENCH_"}
)

// checkEnv refuses a variable that looks like one of ours and is none, which would
// be a setting that does nothing. What is far from every name (strict is false) is
// a user's own.
func checkEnv(environ, names []string, strict bool) error {
	names = append(names, otherNames...)
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "DSEC_") || slices.Contains(names, name) ||
			slices.ContainsFunc(otherPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			continue
		}
		nearest := slices.MinFunc(names, func(a, b string) int { return cmp.Compare(distance(name, a), distance(name, b)) })
		if strict || distance(name, nearest) <= 2 {
			return dsec.Invalid(name, "there is no such variable; is %s meant? `dsec config` lists all keys", nearest)
		}
	}
	return nil
}

// distance is how many characters must be put in, left out or changed to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		above := row[0] // of the column to the left
		row[0] = i + 1
		for j := range len(b) {
			change := above
			if a[i] != b[j] {
				change++
			}
			above = row[j+1]
			row[j+1] = min(change, above+1, row[j]+1)
		}
	}
	return row[len(b)]
}

func splitList(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}

// Validate reports the first value that cannot work.
func (c *Config) Validate() error {
	for field, dir := range map[string]string{"data_dir": c.DataDir, "run_dir": c.RunDir} {
		if !filepath.IsAbs(dir) && (dir != "" || field != "run_dir") {
			return dsec.Invalid(field, "want an absolute path")
		}
	}
	if err := c.API.validate(); err != nil {
		return err
	}
	if err := c.Container.validate(); err != nil {
		return err
	}
	if err := c.Layers.validate(); err != nil {
		return err
	}
	if err := c.Registry.validate(); err != nil {
		return err
	}
	return c.Edge.validate()
}

func (c *ContainerConfig) validate() error {
	for _, r := range []struct {
		name         string
		v, low, high int64
	}{
		{"warm", c.Warm, 0, 4096},
		{"ready", c.Ready, 1, 256},
		{"disk_image_bytes", c.DiskImageBytes, 0, 1 << 50},
		{"disk_image_max_bytes", c.DiskImageMaxBytes, 0, 1 << 50},
		{"disk_share", c.DiskShare, 1, 100},
	} {
		if r.v < r.low || r.v > r.high {
			return dsec.Invalid("container."+r.name, "is %d, want %d to %d", r.v, r.low, r.high)
		}
	}
	if strings.ContainsAny(c.Cgroup, "/.\x00") {
		return dsec.Invalid("container.cgroup", "want one name, or nothing")
	}
	switch c.DiskDriver {
	case "", "project", "btrfs", "ext4", "tmpfs":
		return nil
	}
	return dsec.Invalid("container.disk_driver", "%q: want project, btrfs, ext4, tmpfs or nothing", c.DiskDriver)
}

func (a *APIConfig) validate() error {
	host, port, err := net.SplitHostPort(a.Listen)
	if err != nil {
		return dsec.Invalid("api.listen", "want host:port")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return dsec.Invalid("api.listen", "want a port of 0 to 65535")
	}
	if (a.TLSCert == "") != (a.TLSKey == "") {
		return dsec.Invalid("api.tls_cert", "want both tls_cert and tls_key, or neither")
	}
	ip := net.ParseIP(host)
	if a.TLSCert == "" && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return dsec.Invalid("api.listen", "want a loopback address such as 127.0.0.1; another needs api.tls_cert and api.tls_key, for keys must not travel in the clear")
	}
	for i, text := range a.WebhookAllow {
		if _, err := netip.ParsePrefix(text); err != nil {
			return dsec.Invalid(fmt.Sprintf("api.webhook_allow[%d]", i), "%q: want a network such as 10.0.0.0/8", text)
		}
	}
	if d := a.WebhookGiveUp.Duration; d < time.Second || d > 30*24*time.Hour {
		return dsec.Invalid("api.webhook_give_up", "is %s, want 1s to 720h", d)
	}
	return nil
}

// webhookAllow are the networks of webhook_allow.
func (c *Config) webhookAllow() (list []netip.Prefix) {
	for _, text := range c.API.WebhookAllow {
		list = append(list, netip.MustParsePrefix(text).Masked())
	}
	return list
}

func (e *EdgeConfig) validate() error {
	if len(e.Backends) == 0 {
		return dsec.Invalid("edge.backends", "want at least one of: %s", strings.Join(backendNames(), ", "))
	}
	for _, name := range e.Backends {
		if _, ok := findBackend(name); !ok {
			return dsec.Invalid("edge.backends", "%q: want one of: %s", name, strings.Join(backendNames(), ", "))
		}
	}
	for _, r := range []struct {
		name         string
		v, low, high int64
	}{
		{"max_sandboxes", e.MaxSandboxes, 1, 1_000_000},
		{"max_calls", e.MaxCalls, 1, 100_000},
		{"create_concurrency", e.CreateConcurrency, 1, 1024},
		{"min_free_bytes", e.MinFreeBytes, 0, 1 << 50},
		{"min_free_inodes", e.MinFreeInodes, 0, 1 << 40},
		{"trajectory.max_bytes", e.Trajectory.MaxBytes, 1 << 28, 1 << 50},
		{"trajectory.max_output_bytes", e.Trajectory.MaxOutputBytes, 1, trajectory.MaxKept},
		{"trajectory.max_sandbox_output_bytes", e.Trajectory.MaxSandboxOutputBytes, 1, 1 << 50},
		{"trajectory.max_input_bytes", e.Trajectory.MaxInputBytes, 1, trajectory.MaxKept},
		{"trajectory.max_sandbox_input_bytes", e.Trajectory.MaxSandboxInputBytes, 1, 1 << 50},
	} {
		if r.v < r.low || r.v > r.high {
			return dsec.Invalid("edge."+r.name, "is %d, want %d to %d", r.v, r.low, r.high)
		}
	}
	if err := e.Trajectory.validate(); err != nil {
		return err
	}
	const longest = 366 * 24 * time.Hour
	for _, r := range []struct {
		name   string
		v, low time.Duration
	}{
		{"default_idle_timeout", e.DefaultIdleTimeout.Duration, 0},
		{"default_max_lifetime", e.DefaultMaxLifetime.Duration, 0},
		{"default_max_paused", e.DefaultMaxPaused.Duration, 0},
		{"retention", e.Retention.Duration, time.Minute},
	} {
		if r.v < r.low || r.v > longest {
			return dsec.Invalid("edge."+r.name, "is %v, want %v to %v", r.v, r.low, longest)
		}
	}
	def, most := e.DefaultLimits.rows(), e.MaxLimits.rows()
	for i, m := range most {
		if m.v < 1 {
			return dsec.Invalid("edge.max_limits."+m.name, "is %d, want at least 1", m.v)
		}
		if d := def[i]; d.v < 1 || d.v > m.v {
			return dsec.Invalid("edge.default_limits."+d.name, "is %d, want 1 to edge.max_limits.%s, %d", d.v, m.name, m.v)
		}
	}
	return nil
}

type limitRow struct {
	name string
	v    int64
}

func (l Limits) rows() []limitRow {
	return []limitRow{
		{"milli_cpu", l.MilliCPU},
		{"memory_bytes", l.MemoryBytes},
		{"disk_bytes", l.DiskBytes},
		{"disk_inodes", l.DiskInodes},
		{"pids", l.Pids},
	}
}
