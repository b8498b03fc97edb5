package fake

import (
	"errors"
	"strings"
)

// The grammar of the fake's shell: commands with quotes, $NAME, ${NAME}, $?,
// $$, $(...), assignments and redirections, joined by ; newline && || | and &.
// What a real shell has beyond that is a syntax error, not something else.

type tokenKind uint8

const (
	tokenWord tokenKind = iota
	tokenOp             // ; & && || | newline
	tokenRedirect
)

// part is a piece of a word.
type part struct {
	text   string // literal
	name   string // of a variable, where set
	script string // of a command substitution, where set
	quoted bool
}

type token struct {
	kind  tokenKind
	op    string
	parts []part
}

var errSyntax = errors.New("syntax error")

// tokenize splits a script into tokens.
func tokenize(src string) ([]token, error) {
	var out []token
	for i := 0; i < len(src); {
		c := src[i]
		switch {
		case c == ' ' || c == '\t' || c == '\r':
			i++
		case c == '#':
			for i < len(src) && src[i] != '\n' {
				i++
			}
		case strings.HasPrefix(src[i:], "&&") || strings.HasPrefix(src[i:], "||"):
			out = append(out, token{kind: tokenOp, op: src[i : i+2]})
			i += 2
		case strings.IndexByte(";&|\n", c) >= 0:
			out = append(out, token{kind: tokenOp, op: src[i : i+1]})
			i++
		case strings.IndexByte("(){}`", c) >= 0:
			return nil, errSyntax
		default:
			if op := redirect(src[i:]); op != "" {
				out = append(out, token{kind: tokenRedirect, op: op})
				i += len(op)
				continue
			}
			parts, n, err := word(src[i:])
			if err != nil {
				return nil, err
			}
			out = append(out, token{kind: tokenWord, parts: parts})
			i += n
		}
	}
	return out, nil
}

// redirect returns the redirection operator at the start of s.
func redirect(s string) string {
	for _, op := range []string{"2>&1", ">&2", "1>&2", "2>>", "2>", ">>", ">", "<"} {
		if strings.HasPrefix(s, op) && !strings.HasPrefix(s, "<<") {
			return op
		}
	}
	return ""
}

// word reads one word at the start of s and returns its length.
func word(s string) (parts []part, n int, err error) {
	for n < len(s) {
		c := s[n]
		switch {
		case strings.IndexByte(" \t\r\n;&|<>()", c) >= 0:
			return parts, n, nil
		case c == '\'':
			end := strings.IndexByte(s[n+1:], '\'')
			if end < 0 {
				return nil, 0, errSyntax
			}
			parts = append(parts, part{text: s[n+1 : n+1+end], quoted: true})
			n += end + 2
		case c == '"':
			quoted, m, err := doubleQuoted(s[n+1:])
			if err != nil {
				return nil, 0, err
			}
			parts = append(parts, quoted...)
			n += m + 1
		case c == '\\' && n+1 < len(s):
			parts = append(parts, part{text: s[n+1 : n+2], quoted: true})
			n += 2
		case c == '$':
			p, m, err := dollar(s[n:])
			if err != nil {
				return nil, 0, err
			}
			parts = append(parts, p)
			n += m
		case c == '`':
			return nil, 0, errSyntax
		default:
			end := n + 1
			for end < len(s) && strings.IndexByte(" \t\r\n;&|<>()'\"\\$`", s[end]) < 0 {
				end++
			}
			parts = append(parts, part{text: s[n:end]})
			n = end
		}
	}
	return parts, n, nil
}

// doubleQuoted reads up to the closing quote, which counts in the length.
func doubleQuoted(s string) (parts []part, n int, err error) {
	text := ""
	for n < len(s) {
		switch c := s[n]; {
		case c == '"':
			return append(parts, part{text: text, quoted: true}), n + 1, nil
		case c == '\\' && n+1 < len(s) && strings.IndexByte(`"\$`+"`", s[n+1]) >= 0:
			text += s[n+1 : n+2]
			n += 2
		case c == '$':
			p, m, err := dollar(s[n:])
			if err != nil {
				return nil, 0, err
			}
			p.quoted = true
			parts = append(parts, part{text: text, quoted: true}, p)
			text = ""
			n += m
		default:
			text += s[n : n+1]
			n++
		}
	}
	return nil, 0, errSyntax
}

// dollar reads an expansion at the start of s.
func dollar(s string) (part, int, error) {
	if len(s) < 2 {
		return part{text: "$"}, 1, nil
	}
	switch c := s[1]; c {
	case '?', '$':
		return part{name: s[1:2]}, 2, nil
	case '{':
		end := strings.IndexByte(s, '}')
		if end < 0 || !isName(s[2:end]) {
			return part{}, 0, errSyntax
		}
		return part{name: s[2:end]}, end + 1, nil
	case '(':
		depth := 0
		for i := 1; i < len(s); i++ {
			switch s[i] {
			case '(':
				depth++
			case ')':
				if depth--; depth == 0 {
					return part{script: s[2:i]}, i + 1, nil
				}
			}
		}
		return part{}, 0, errSyntax
	}
	end := 1
	for end < len(s) && isName(s[1:end+1]) {
		end++
	}
	if end == 1 {
		return part{text: "$"}, 1, nil
	}
	return part{name: s[1:end]}, end, nil
}

func isName(s string) bool {
	for i, c := range []byte(s) {
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// redirection sends one stream elsewhere.
type redirection struct {
	op     string
	target []part
}

// command is one simple command.
type command struct {
	words     [][]part
	redirects []redirection
}

// pipeline is commands joined by |; after is what stands before it.
type pipeline struct {
	after      string // "", "&&" or "||"
	commands   []command
	background bool
}

// parse turns a script into the pipelines to run one after the other.
func parse(src string) ([]pipeline, error) {
	tokens, err := tokenize(src)
	if err != nil {
		return nil, err
	}
	var out []pipeline
	cur, cmd := pipeline{}, command{}
	wantWord := false // after && || |
	endCommand := func() bool {
		if len(cmd.words) == 0 && len(cmd.redirects) == 0 {
			return false
		}
		cur.commands = append(cur.commands, cmd)
		cmd = command{}
		return true
	}
	for i := 0; i < len(tokens); i++ {
		t := tokens[i]
		switch t.kind {
		case tokenWord:
			cmd.words = append(cmd.words, t.parts)
			wantWord = false
		case tokenRedirect:
			r := redirection{op: t.op}
			if !strings.Contains(t.op, "&") {
				if i++; i == len(tokens) || tokens[i].kind != tokenWord {
					return nil, errSyntax
				}
				r.target = tokens[i].parts
			}
			cmd.redirects = append(cmd.redirects, r)
			wantWord = false
		case tokenOp:
			some := endCommand()
			if t.op == "\n" && !some {
				continue // a blank line, also after && || |
			}
			if !some || wantWord {
				return nil, errSyntax
			}
			if t.op == "|" {
				wantWord = true
				continue
			}
			cur.background = t.op == "&"
			out = append(out, cur)
			cur = pipeline{}
			if t.op == "&&" || t.op == "||" {
				cur.after, wantWord = t.op, true
			}
		}
	}
	if wantWord {
		return nil, errSyntax
	}
	if endCommand() {
		out = append(out, cur)
	}
	return out, nil
}
