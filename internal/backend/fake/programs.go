package fake

import (
	"bytes"
	"fmt"
	"io"
	"path"
	"sort"
	"strconv"
	"strings"
	"time"
)

// task is one run of a program.
type task struct {
	c      *chronus
	p      *process
	args   []string // args[0] is the program
	env    *environ
	cwd    string
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	done   <-chan struct{} // closed when a signal ends the program
}

func (t *task) fail(format string, args ...any) int {
	_, _ = fmt.Fprintf(t.stderr, t.args[0]+": "+format+"\n", args...)
	return 1
}

func (t *task) abs(name string) string {
	if path.IsAbs(name) {
		return name
	}
	return t.cwd + "/" + name
}

// environ is an environment that keeps its order.
type environ struct {
	names  []string
	values map[string]string
}

func newEnviron(list []string) *environ {
	e := &environ{values: make(map[string]string)}
	for _, kv := range list {
		k, v, _ := strings.Cut(kv, "=")
		e.set(k, v)
	}
	return e
}

func (e *environ) set(k, v string) {
	if _, ok := e.values[k]; !ok {
		e.names = append(e.names, k)
	}
	e.values[k] = v
}

func (e *environ) list() []string {
	out := make([]string, 0, len(e.names))
	for _, k := range e.names {
		out = append(out, k+"="+e.values[k])
	}
	return out
}

// programs are what a fake sandbox can run, whatever directory is named.
var programs map[string]func(*task) int

func init() {
	programs = map[string]func(*task) int{
		"true":   func(*task) int { return 0 },
		"false":  func(*task) int { return 1 },
		"sync":   func(*task) int { return 0 },
		"exit":   exitProgram,
		"echo":   echo,
		"printf": printf,
		"cat":    cat,
		"yes":    yes,
		"sleep":  sleep,
		"env":    env,
		"pwd":    func(t *task) int { _, err := fmt.Fprintln(t.stdout, path.Clean(t.cwd)); return status(err) },
		"id":     func(t *task) int { _, err := fmt.Fprintln(t.stdout, "uid=0(root) gid=0(root)"); return status(err) },
		"wc":     wc,
		"head":   head,
		"seq":    seq,
		"ls":     ls,
		"mkdir":  mkdir,
		"rm":     rm,
		"kill":   kill,
		"sh":     sh,
		"bash":   sh,
	}
}

func status(err error) int {
	if err != nil {
		return 1
	}
	return 0
}

func exitProgram(t *task) int {
	if len(t.args) < 2 {
		return 0
	}
	n, err := strconv.Atoi(t.args[1])
	if err != nil {
		t.fail("%s: a number is wanted", t.args[1])
		return 2
	}
	return n & 0xff
}

func echo(t *task) int {
	args, end := t.args[1:], "\n"
	if len(args) > 0 && args[0] == "-n" {
		args, end = args[1:], ""
	}
	_, err := io.WriteString(t.stdout, strings.Join(args, " ")+end)
	return status(err)
}

// printf knows %s, %d, %% and the common escapes.
func printf(t *task) int {
	if len(t.args) < 2 {
		return t.fail("a format is wanted")
	}
	var out bytes.Buffer
	format, args := t.args[1], t.args[2:]
	for i := 0; i < len(format); i++ {
		switch {
		case format[i] == '\\' && i+1 < len(format):
			i++
			switch format[i] {
			case 'n':
				out.WriteByte('\n')
			case 't':
				out.WriteByte('\t')
			case 'r':
				out.WriteByte('\r')
			case '0', '1', '2', '3':
				n := min(3, len(format)-i)
				v, err := strconv.ParseUint(format[i:i+n], 8, 8)
				if err != nil {
					return t.fail("bad octal escape")
				}
				out.WriteByte(byte(v))
				i += n - 1
			case 'x':
				if i+2 >= len(format) {
					return t.fail("bad hexadecimal escape")
				}
				v, err := strconv.ParseUint(format[i+1:i+3], 16, 8)
				if err != nil {
					return t.fail("bad hexadecimal escape")
				}
				out.WriteByte(byte(v))
				i += 2
			default:
				out.WriteByte(format[i])
			}
		case format[i] == '%' && i+1 < len(format):
			i++
			switch format[i] {
			case 's', 'd':
				if len(args) > 0 {
					out.WriteString(args[0])
					args = args[1:]
				}
			default:
				out.WriteByte(format[i])
			}
		default:
			out.WriteByte(format[i])
		}
	}
	_, err := t.stdout.Write(out.Bytes())
	return status(err)
}

func cat(t *task) int {
	if len(t.args) == 1 {
		_, err := io.Copy(t.stdout, t.stdin)
		return status(err)
	}
	code := 0
	for _, name := range t.args[1:] {
		b, err := t.c.fs.readFile(t.abs(name))
		if err != nil {
			code = t.fail("%s: %v", name, err)
			continue
		}
		if _, err := t.stdout.Write(b); err != nil {
			return 1
		}
	}
	return code
}

func yes(t *task) int {
	word := "y"
	if len(t.args) > 1 {
		word = strings.Join(t.args[1:], " ")
	}
	block := bytes.Repeat([]byte(word+"\n"), 4096/(len(word)+1)+1)
	for {
		if _, err := t.stdout.Write(block); err != nil {
			return 1
		}
	}
}

func sleep(t *task) int {
	if len(t.args) != 2 {
		return t.fail("one count of seconds is wanted")
	}
	d := time.Duration(1<<63 - 1)
	if t.args[1] != "infinity" {
		seconds, err := strconv.ParseFloat(t.args[1], 64)
		if err != nil || seconds < 0 || seconds > 1e9 {
			return t.fail("invalid time interval %q", t.args[1])
		}
		d = time.Duration(seconds * float64(time.Second))
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return 0
	case <-t.done:
		return 1
	}
}

func env(t *task) int {
	for _, kv := range t.env.list() {
		if _, err := fmt.Fprintln(t.stdout, kv); err != nil {
			return 1
		}
	}
	return 0
}

// wc knows -c and -l.
func wc(t *task) int {
	b, err := io.ReadAll(t.stdin)
	if err != nil {
		return 1
	}
	n := len(b)
	if len(t.args) > 1 && t.args[1] == "-l" {
		n = bytes.Count(b, []byte("\n"))
	}
	_, err = fmt.Fprintln(t.stdout, n)
	return status(err)
}

// head knows -c N.
func head(t *task) int {
	if len(t.args) != 3 || t.args[1] != "-c" {
		return t.fail("-c and a count of bytes are wanted")
	}
	n, err := strconv.ParseInt(t.args[2], 10, 64)
	if err != nil {
		return t.fail("invalid count %q", t.args[2])
	}
	_, err = io.Copy(t.stdout, io.LimitReader(t.stdin, n))
	return status(err)
}

func seq(t *task) int {
	n, err := strconv.Atoi(t.args[len(t.args)-1])
	if err != nil || len(t.args) != 2 {
		return t.fail("one number is wanted")
	}
	for i := 1; i <= n; i++ {
		if _, err := fmt.Fprintln(t.stdout, i); err != nil {
			return 1
		}
	}
	return 0
}

func ls(t *task) int {
	dir := t.cwd
	if len(t.args) > 1 {
		dir = t.abs(t.args[1])
	}
	names, err := t.c.fs.names(dir)
	if err != nil {
		return t.fail("%v", err)
	}
	sort.Strings(names)
	for _, n := range names {
		if _, err := fmt.Fprintln(t.stdout, n); err != nil {
			return 1
		}
	}
	return 0
}

func mkdir(t *task) int {
	args, parents := t.args[1:], false
	if len(args) > 0 && args[0] == "-p" {
		args, parents = args[1:], true
	}
	for _, name := range args {
		if err := t.c.fs.mkdir(t.abs(name), 0o755, parents); err != nil {
			return t.fail("%s: %v", name, err)
		}
	}
	return 0
}

func rm(t *task) int {
	args, recursive, force := t.args[1:], false, false
	for len(args) > 0 && strings.HasPrefix(args[0], "-") {
		recursive = recursive || strings.Contains(args[0], "r")
		force = force || strings.Contains(args[0], "f")
		args = args[1:]
	}
	for _, name := range args {
		if err := t.c.fs.remove(t.abs(name), recursive); err != nil && !force {
			return t.fail("%s: %v", name, err)
		}
	}
	return 0
}

var signalNames = map[string]int{"HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "USR1": 10, "SEGV": 11, "USR2": 12, "PIPE": 13, "TERM": 15}

// kill knows -9, -KILL and -s 9, and the processes that chronus started.
func kill(t *task) int {
	signal, args := 15, t.args[1:]
	if len(args) > 1 && strings.HasPrefix(args[0], "-") {
		name := strings.TrimPrefix(args[0], "-")
		if name == "s" {
			args = args[1:]
			name = args[0]
		}
		args = args[1:]
		n, err := strconv.Atoi(name)
		if err != nil {
			n = signalNames[strings.TrimPrefix(name, "SIG")]
		}
		if n < 1 || n > 64 {
			return t.fail("%s: no such signal", name)
		}
		signal = n
	}
	code := 0
	for _, a := range args {
		pid, err := strconv.Atoi(a)
		if err != nil || !t.c.killPID(t.p, pid, signal) {
			code = t.fail("%s: no such process", a)
		}
	}
	return code
}

// killPID signals the running process with that number; self is the caller's,
// which may be a session's.
func (c *chronus) killPID(self *process, pid, signal int) bool {
	if self.pid == pid {
		self.kill(signal, false)
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.procs {
		if p.pid == pid && !p.spool.done() {
			p.kill(signal, false)
			return true
		}
	}
	return false
}

// sh knows -c; without it, it reads its script from stdin line by line.
func sh(t *task) int {
	s := &shell{task: *t}
	if len(t.args) >= 3 && t.args[1] == "-c" {
		return s.run(t.args[2])
	}
	return s.interactive()
}
