package fake

import (
	"bytes"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// shell runs scripts. Its task holds the state that lasts from one to the next:
// environment, cwd, streams.
type shell struct {
	task
	last   int
	exited bool
}

// run runs a script and returns the status of its last command.
func (s *shell) run(script string) int {
	list, err := parse(script)
	if err != nil {
		_, _ = fmt.Fprintf(s.stderr, "sh: %v\n", err)
		s.last = 2
		return s.last
	}
	for i, p := range list {
		if p.after == "&&" && s.last != 0 || p.after == "||" && s.last == 0 {
			continue
		}
		// A list that starts anew forgets how the one before ended.
		if i > 0 && closed(s.done) {
			break
		}
		s.pipeline(p)
		if s.exited {
			break
		}
	}
	return s.last
}

// interactive reads lines until the input ends.
func (s *shell) interactive() int {
	var line []byte
	prompt := func() {
		if s.p.pty {
			_, _ = io.WriteString(s.stdout, "$ ")
		}
	}
	prompt()
	for b := make([]byte, 1); !s.exited; {
		n, err := s.stdin.Read(b)
		if n == 1 && b[0] != '\n' && b[0] != '\r' {
			line = append(line, b[0])
			continue
		}
		if len(line) > 0 {
			s.run(string(line))
			line = line[:0]
		}
		if err != nil {
			break
		}
		prompt()
	}
	return s.last
}

func (s *shell) pipeline(p pipeline) {
	if p.background {
		child := *s
		child.env = newEnviron(s.env.list())
		child.done = s.p.tree
		child.stdin = bytes.NewReader(nil)
		child.stdout, child.stderr = s.rewire(s.stdout), s.rewire(s.stderr)
		s.p.background.Add(1)
		go func() {
			defer child.p.background.Add(-1)
			child.stages(p.commands)
		}()
		s.last = 0
		return
	}
	s.stages(p.commands)
}

// rewire makes an output live until the whole tree is killed.
func (s *shell) rewire(w io.Writer) io.Writer {
	if o, ok := w.(output); ok {
		o.done = s.p.tree
		return o
	}
	return w
}

// stages runs the commands of a pipeline at once, each in a copy of the shell
// where there are several.
func (s *shell) stages(commands []command) {
	if len(commands) == 1 {
		s.command(commands[0])
		return
	}
	var wg sync.WaitGroup
	in := s.stdin
	for i, cmd := range commands {
		child := *s
		child.env = newEnviron(s.env.list())
		child.stdin = in
		var w *io.PipeWriter
		r, _ := in.(*io.PipeReader)
		if i < len(commands)-1 {
			next, pw := io.Pipe()
			child.stdout, in, w = pw, next, pw
		}
		run := func() {
			child.command(cmd)
			if w != nil {
				_ = w.Close()
			}
			if r != nil {
				_ = r.Close() // the stage before gets an error, as by SIGPIPE
			}
		}
		if i == len(commands)-1 {
			run()
			s.last = child.last
		} else {
			wg.Go(run)
		}
	}
	wg.Wait()
}

// command expands and runs one simple command.
func (s *shell) command(cmd command) {
	words := make([]string, 0, len(cmd.words))
	for _, w := range cmd.words {
		words = append(words, s.expand(w)...)
	}
	assigns := 0
	for assigns < len(words) {
		k, _, ok := strings.Cut(words[assigns], "=")
		if !ok || !isName(k) || cmd.words[assigns][0].quoted {
			break
		}
		assigns++
	}
	restore, err := s.redirect(cmd.redirects)
	if err != nil {
		s.last = 1
		_, _ = fmt.Fprintf(s.stderr, "sh: %v\n", err)
		return
	}
	defer restore()
	if assigns == len(words) {
		for _, a := range words {
			k, v, _ := strings.Cut(a, "=")
			s.env.set(k, v)
		}
		s.last = 0
		return
	}
	t := s.task
	t.args = words[assigns:]
	if assigns > 0 {
		t.env = newEnviron(append(s.env.list(), words[:assigns]...))
	}
	s.last = s.dispatch(&t)
}

func (s *shell) dispatch(t *task) int {
	switch t.args[0] {
	case "cd":
		return s.cd(t)
	case "export":
		for _, a := range t.args[1:] {
			if k, v, ok := strings.Cut(a, "="); ok {
				s.env.set(k, v)
			}
		}
		return 0
	case "exit":
		s.exited = true
		if len(t.args) < 2 {
			return s.last
		}
		return exitProgram(t)
	case ":":
		return 0
	}
	program := programs[path.Base(t.args[0])]
	if program == nil {
		_, _ = fmt.Fprintf(t.stderr, "sh: %s: not found\n", t.args[0])
		return 127
	}
	if !t.c.m.pass(t.done) {
		return 1
	}
	return program(t)
}

func (s *shell) cd(t *task) int {
	dir := s.env.values["HOME"]
	if len(t.args) > 1 {
		dir = t.args[1]
	}
	dir = path.Clean(t.abs(dir))
	n, err := s.c.fs.lookup(dir, true)
	if err != nil || n.kind != kindDir {
		return t.fail("%s: no such directory", dir)
	}
	s.cwd = dir
	s.env.set("PWD", dir)
	return 0
}

// redirect points the shell's streams elsewhere until restore is called.
func (s *shell) redirect(list []redirection) (restore func(), err error) {
	in, out, errOut := s.stdin, s.stdout, s.stderr
	restore = func() { s.stdin, s.stdout, s.stderr = in, out, errOut }
	for _, r := range list {
		name := ""
		if r.target != nil {
			name = strings.Join(s.expand(r.target), " ")
		}
		var w io.Writer
		switch {
		case r.op == "2>&1":
			s.stderr = s.stdout
			continue
		case r.op == ">&2" || r.op == "1>&2":
			s.stdout = s.stderr
			continue
		case r.op == "<":
			b, err := s.c.fs.readFile(s.abs(name))
			if err != nil {
				restore()
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			s.stdin = bytes.NewReader(b)
			continue
		case name == "/dev/null":
			w = io.Discard
		default:
			file := fileWriter{s.c.fs, s.abs(name)}
			if err := s.c.fs.writeFile(file.path, nil, 0, strings.HasSuffix(r.op, ">>")); err != nil {
				restore()
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			w = file
		}
		if strings.HasPrefix(r.op, "2") {
			s.stderr = w
		} else {
			s.stdout = w
		}
	}
	return restore, nil
}

// fileWriter appends to a file.
type fileWriter struct {
	fs   *fileSystem
	path string
}

// Write implements io.Writer.
func (w fileWriter) Write(b []byte) (int, error) {
	if err := w.fs.writeFile(w.path, b, 0, true); err != nil {
		return 0, err
	}
	return len(b), nil
}

// expand turns a word into fields: unquoted expansions are split at blanks.
func (s *shell) expand(parts []part) []string {
	var out []string
	cur, some := "", false
	for _, p := range parts {
		text := p.text
		switch {
		case p.name == "?":
			text = strconv.Itoa(s.last)
		case p.name == "$":
			text = strconv.Itoa(s.p.pid)
		case p.name != "":
			text = s.env.values[p.name]
		case p.script != "":
			text = s.substitute(p.script)
		}
		if p.quoted || p.name == "" && p.script == "" {
			cur, some = cur+text, some || p.quoted || text != ""
			continue
		}
		fields := strings.Fields(text)
		for i, f := range fields {
			if i > 0 {
				out = append(out, cur)
				cur = ""
			}
			cur, some = cur+f, true
		}
	}
	if some {
		out = append(out, cur)
	}
	return slices.Clip(out)
}

func (s *shell) substitute(script string) string {
	var out bytes.Buffer
	child := *s
	child.env = newEnviron(s.env.list())
	child.stdout = &out
	child.run(script)
	s.last = child.last
	return strings.TrimRight(out.String(), "\n")
}
