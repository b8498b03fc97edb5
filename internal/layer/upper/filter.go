package upper

import (
	"archive/tar"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// Filter decides what of a tree is written to a tar stream, of which it writes the headers.
// Who walks the tree asks it of each name (Judge), of the start of each file that is to be
// written (Secret), and has it write directories around what is in them (Dir).
type Filter struct {
	Report Report

	tw    *tar.Writer
	rules *rules // nil: all is written
	// waiting are the headers of directories that are written before what is in them,
	// if something is.
	waiting []*tar.Header
}

// NewFilter makes the filter of one stream. Without a Scrub it leaves all in.
func NewFilter(tw *tar.Writer, scrub *Scrub) (*Filter, error) {
	f := &Filter{tw: tw}
	if scrub == nil {
		return f, nil
	}
	rules, err := scrub.rules()
	f.rules, f.Report.Removed = &rules, make([]Removal, 0, maxRemovals)
	return f, err
}

// Inside is where in the tree an entry is.
type Inside struct {
	removed *Removal // not to be written: what it counts for
	kept    bool     // written whatever the rules say
}

// Removed reports whether a name that is no directory is not to be written, and counts it.
func (in Inside) Removed(regular bool, size int64) bool {
	if in.removed != nil {
		in.removed.count(regular, size)
	}
	return in.removed != nil
}

// Judge decides whether an entry is written. What a whiteout hides stays hidden.
func (f *Filter) Judge(parts []string, in Inside, whiteout bool) Inside {
	switch {
	case f.rules == nil:
		return in
	case in.removed != nil && in.removed.Reason == reasonPlatform:
		return in
	case in.removed == nil && matchAny(platform, parts):
		return Inside{removed: f.Report.begin(plain(parts), reasonPlatform, "")}
	case whiteout || in.kept || matchAny(f.rules.keep, parts):
		return Inside{kept: true}
	case in.removed != nil:
		return in
	}
	if reason := f.rules.reason(parts); reason != "" {
		in.removed = f.Report.begin(plain(parts), reason, "")
	}
	return in
}

// Scrubs reports whether files are looked into.
func (f *Filter) Scrubs() bool { return f.rules != nil && f.rules.secrets != SecretsKeep }

// Secret reports whether a file is left out for what its head, of convert.LintBytes, holds.
func (f *Filter) Secret(parts []string, head []byte, size int64, in Inside) (bool, error) {
	if in.kept || !f.Scrubs() {
		return false, nil
	}
	parent := ""
	if len(parts) > 1 {
		parent = parts[len(parts)-2]
	}
	what := convert.Secret(parent, parts[len(parts)-1], head)
	if what == "" {
		return false, nil
	}
	if f.rules.secrets == SecretsRefuse {
		return false, dsec.Invalid("scrub.secrets", "%s holds %s, want none or another way to treat it", quote(parts), what)
	}
	f.Report.begin(plain(parts), reasonSecret, what).count(true, size)
	return true, nil
}

// Dir writes a directory, and what is in it by below. Of one that is not to be written
// there is what hides layers below, and what is kept in it.
func (f *Filter) Dir(hdr *tar.Header, opaque bool, in Inside, below func() error) error {
	f.waiting = append(f.waiting, hdr)
	depth := len(f.waiting)
	if in.removed == nil || opaque && in.removed.Reason != reasonPlatform {
		if err := f.flush(); err != nil {
			return err
		}
	}
	if err := below(); err != nil {
		return err
	}
	if len(f.waiting) == depth { // nothing in it was written, nor it
		f.waiting = f.waiting[:depth-1]
		in.removed.count(false, 0)
	}
	return nil
}

// flush writes the directories that something is to be in.
func (f *Filter) flush() error {
	for _, hdr := range f.waiting {
		if err := f.tw.WriteHeader(hdr); err != nil {
			return err
		}
	}
	f.waiting = f.waiting[:0]
	return nil
}

// Put writes the header of anything but a directory.
func (f *Filter) Put(hdr *tar.Header) error {
	if err := f.flush(); err != nil {
		return err
	}
	return f.tw.WriteHeader(hdr)
}

func (r *Removal) count(regular bool, size int64) {
	r.Files++
	if regular {
		r.Bytes += size
	}
}
