package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/units"
)

// flags is a verb's flag set, with what every verb of the client has.
type flags struct {
	*flag.FlagSet
	env    *env
	output string
	url    string
	config string
}

// newFlags makes the flag set of the verb with the given name.
func newFlags(e *env, name string) *flags {
	f := &flags{FlagSet: flag.NewFlagSet(name, flag.ContinueOnError), env: e}
	f.SetOutput(e.stderr)
	f.Usage = func() {
		for _, c := range commands() {
			if c.name == name {
				_, _ = fmt.Fprintf(e.stderr, "usage: dsec %s %s\n\n%s\n\n", c.name, c.args, c.short)
			}
		}
		f.PrintDefaults()
	}
	f.StringVar(&f.config, "config", "", "configuration `file`; default "+defaultConfigFile)
	return f
}

// clientFlags adds what reaches the server.
func clientFlags(e *env, name string) *flags {
	f := newFlags(e, name)
	f.StringVar(&f.output, "o", "table", "output `format`: table or json")
	f.StringVar(&f.url, "url", "", "`URL` of the API; default $DSEC_URL, then the configuration")
	return f
}

// parse takes flags before, between and after the verb's arguments, of which
// it wants from low to high; high < 0 is no limit. With verbatim > 0, what
// follows that many arguments is not the verb's to read.
func (f *flags) parse(args []string, low, high, verbatim int) ([]string, error) {
	var pos []string
	for {
		if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
			return nil, err
		} else if err != nil {
			return nil, errUsage // the flag package has reported it
		}
		rest := f.Args()
		if len(rest) == 0 {
			break
		}
		if ended := len(args) > len(rest) && args[len(args)-len(rest)-1] == "--"; ended {
			pos = append(pos, rest...)
			break
		}
		pos = append(pos, rest[0])
		args = rest[1:]
		if verbatim > 0 && len(pos) == verbatim {
			if len(args) > 0 && args[0] == "--" {
				args = args[1:]
			}
			pos = append(pos, args...)
			break
		}
	}
	if f.output != "" && f.output != "table" && f.output != "json" {
		return nil, dsec.Invalid("-o", "want table or json")
	}
	if len(pos) < low || high >= 0 && len(pos) > high {
		f.Usage()
		return nil, errUsage
	}
	return pos, nil
}

// connect is parse and client in one; the caller closes the client.
func (f *flags) connect(args []string, low, high, verbatim int) (*client.Client, []string, error) {
	args, err := f.parse(args, low, high, verbatim)
	if err != nil {
		return nil, nil, err
	}
	c, err := f.client()
	return c, args, err
}

// client makes the API client.
func (f *flags) client() (*client.Client, error) {
	cfg, err := loadConfig(f.config, false)
	if err != nil {
		return nil, err
	}
	o := client.Options{URL: f.url}
	if os.Getenv("DSEC_URL") == "" && f.url == "" {
		o.URL = cfg.API.urlOf(cfg.API.Listen)
	}
	if os.Getenv("DSEC_KEY_FILE") == "" {
		o.KeyFile = cfg.adminKey()
	}
	return client.New(o)
}

// forEach is a verb that does one thing to each of its arguments, up to the
// first that fails. done names them in JSON.
func forEach(
	ctx context.Context, e *env, args []string, verb, done string,
	do func(c *client.Client, ctx context.Context, arg string) error,
) error {
	f := clientFlags(e, verb)
	c, args, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, arg := range args {
		if err := do(c, ctx, arg); err != nil {
			return err
		}
	}
	if f.output == "json" {
		return f.print(map[string]any{done: args}, "", nil)
	}
	return nil
}

// list is a verb that shows all that there are of one thing, a row each.
func list[T any](
	ctx context.Context, e *env, args []string, verb, head string,
	get func(c *client.Client, ctx context.Context) ([]T, error), row func(T) []string,
) error {
	f := clientFlags(e, verb)
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	all, err := get(c, ctx)
	if err != nil {
		return err
	}
	rows := make([][]string, len(all))
	for i, v := range all {
		rows[i] = row(v)
	}
	return f.print(all, head, rows)
}

// urlOf is the URL of the API at an address that it listens on.
func (a *APIConfig) urlOf(address string) string {
	if a.TLSCert != "" {
		return "https://" + address
	}
	return "http://" + address
}

// print writes v as JSON, or the rows as a table under the head.
func (f *flags) print(v any, head string, rows [][]string) error {
	if f.output == "json" {
		enc := json.NewEncoder(f.env.stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	return table(f.env.stdout, head, rows)
}

func table(w io.Writer, head string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	if head != "" {
		_, _ = fmt.Fprintln(tw, strings.ReplaceAll(head, " ", "\t"))
	}
	for _, r := range rows {
		_, _ = fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

// pairs is a flag of KEY=VALUE that can be given many times.
type pairs struct{ m map[string]string }

// String implements flag.Value.
func (p *pairs) String() string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(p.m)) {
		out = append(out, k+"="+p.m[k])
	}
	return strings.Join(out, ",")
}

// Set implements flag.Value.
func (p *pairs) Set(s string) error {
	k, v, ok := strings.Cut(s, "=")
	if !ok || k == "" {
		return errors.New("want KEY=VALUE")
	}
	if p.m == nil {
		p.m = map[string]string{}
	}
	p.m[k] = v
	return nil
}

// span is a flag of time: 90s, 1h30m.
type span struct{ d *time.Duration }

// String implements flag.Value.
func (s span) String() string {
	if s.d == nil || *s.d == 0 {
		return ""
	}
	return s.d.String()
}

// Set implements flag.Value.
func (s span) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil {
		hint := ""
		if _, nerr := strconv.ParseFloat(text, 64); nerr == nil {
			hint = "; for " + text + " seconds write " + text + "s"
		}
		return errors.New("want a number with a unit, such as 500ms, 90s, 30m or 1h30m" + hint)
	}
	*s.d = d
	return nil
}

// size is a flag of bytes: 512M, 2G, 1.5g, 4096.
type size struct{ n *int64 }

// String implements flag.Value.
func (s size) String() string {
	if s.n == nil || *s.n == 0 {
		return ""
	}
	return units.Bytes(*s.n)
}

// Set implements flag.Value.
func (s size) Set(text string) error {
	n, err := parseSize(text)
	*s.n = n
	return err
}

var sizeUnits = []struct {
	suffix string
	n      int64
}{{"T", 1 << 40}, {"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

func parseSize(text string) (int64, error) {
	bad := errors.New("want bytes as 4096, 512K, 256M, 1.5G or 1T")
	unit := int64(1)
	num := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(text), "B"), "I")
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(num, u.suffix); ok {
			num, unit = rest, u.n
			break
		}
	}
	v, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
	if err != nil || !(v >= 0 && v*float64(unit) < 1<<62) { // NaN is neither
		return 0, bad
	}
	return int64(v * float64(unit)), nil
}
