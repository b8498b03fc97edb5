package layer

import (
	"context"
	"errors"
	"os"
)

const OriginSandbox = "sandbox"

type PackOptions struct {
	Project string
	Parents []string
	Config  Config
	Origin  *Origin
	Scrub   Scrub
}
type Scrub struct {
	Remove, Keep []string
	NoDefaults   bool
	Secrets      string
}

func (s *Scrub) Check() error { return nil }

type PackReport struct {
	Removed      []Removal
	RemovedMore  int64
	Files, Bytes int64
	Collapsed    int
}
type Removal struct {
	Path, Reason, Note string
	Files, Bytes       int64
}

func (s *Store) Pack(ctx context.Context, opt PackOptions, upper *os.File, owner uint32) (Meta, PackReport, error) {
	return Meta{}, PackReport{}, errors.New("not yet")
}
