package trajectory

import (
	"strings"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// What of an entry may be how long, so that an end without output fits into
// endRoom, and a begin with 64 KiB of request into any segment.
const (
	maxText     = 512      // message, reason, note, caller
	maxPath     = 4 << 10  // cwd, user, path, one argument
	maxCommand  = 16 << 10 // shell, all of argv
	maxResponse = 4 << 10
)

// cutString cuts s to n bytes and leaves no half of a character.
func cutString(s string, n int) string {
	if s = strings.ToValidUTF8(s, "\uFFFD"); len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	return s
}

func cutBytes(b []byte, n int) []byte { return b[:min(len(b), n)] }

// boundRequest cuts what is too long of a description.
func boundRequest(r *dsecv1.TrajectoryRequest) {
	if r == nil {
		return
	}
	text := func(s *string, n int) {
		r.Cut = r.Cut || len(*s) > n
		*s = cutString(*s, n)
	}
	text(&r.Shell, maxCommand)
	text(&r.Cwd, maxPath)
	text(&r.User, maxPath)
	text(&r.Note, maxText)
	text(&r.SessionId, maxText)
	r.Cut = r.Cut || len(r.Path) > maxPath || len(r.NewPath) > maxPath
	r.Path, r.NewPath = cutBytes(r.Path, maxPath), cutBytes(r.NewPath, maxPath)
	left := maxCommand
	for i, arg := range r.Argv {
		n := min(left, maxPath)
		if len(arg) > n {
			r.Cut = true
			r.Argv[i] = cutBytes(arg, n)
		}
		if left -= len(r.Argv[i]) + 4; left <= 0 {
			r.Cut = r.Cut || i+1 < len(r.Argv)
			r.Argv = r.Argv[:i+1]
			return
		}
	}
}

// boundTexts cuts what is too long beside request and output.
func boundTexts(e *dsecv1.TrajectoryEntry) {
	e.Caller, e.State, e.Reason, e.SessionId = cutString(e.Caller, maxText), cutString(e.State, maxText), cutString(e.Reason, maxText), cutString(e.SessionId, maxText)
	if len(e.Response) > maxResponse {
		e.Response = nil
	}
	e.RequestDigest = cutBytes(e.RequestDigest, 64)
	if e.Error != nil {
		e.Error.Message = cutString(e.Error.Message, maxText)
		if d := e.Error.Detail; d != nil {
			d.Code, d.Field = cutString(d.Code, maxText/8), cutString(d.Field, maxText/8)
		}
	}
}
