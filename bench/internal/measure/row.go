// Package measure is what the programs of bench share: a row of results beside a
// rival's, contestants that take turns, facts of the host, and a `dsec up` of one's
// own.
package measure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is one figure beside one rival's.
type Row struct {
	ID         string   `json:"id"`
	Value      float64  `json:"value"`
	Unit       string   `json:"unit"`
	Rival      string   `json:"rival,omitempty"`
	RivalValue *float64 `json:"rival_value,omitempty"`
	Floor      *float64 `json:"floor,omitempty"` // what the kernel alone takes, in the same run
	Features   []string `json:"features"`
	Host       string   `json:"host"`
	Load       float64  `json:"load"`
	What       string   `json:"what"`
	P99        *float64 `json:"p99,omitempty"`    // ms
	CPU        *float64 `json:"cpu_ms,omitempty"` // of the whole machine, for one sample
	Samples    int      `json:"samples,omitempty"`
	Must       *float64 `json:"must,omitempty"`
	Aim        *float64 `json:"aim,omitempty"`
	Met        string   `json:"met,omitempty"` // aim, must or no
	Note       string   `json:"note,omitempty"`
	Time       string   `json:"time"`

	direction direction
	absent    bool // the rival is not installed
}

// direction says which side of a target is good.
type direction int

// The directions.
const (
	AtMost direction = iota
	AtLeast
)

// NewRow makes a row: value is in unit.
func NewRow(id, what, unit string, value float64) Row {
	return Row{ID: id, What: what, Unit: unit, Value: round(value), Host: HostFacts(), Load: load(), Time: time.Now().UTC().Format(time.RFC3339), Features: []string{}}
}

// round keeps four digits: more are noise.
func round(v float64) float64 {
	if v == 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return v
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

func ptr(v float64) *float64 { v = round(v); return &v }

// Target sets what is owed and what is wanted.
func (r Row) Target(d direction, must, aim float64) Row {
	r.direction, r.Must, r.Aim = d, ptr(must), ptr(aim)
	reached := func(t float64) bool { return d == AtMost && r.Value <= t || d == AtLeast && r.Value >= t }
	switch {
	case reached(aim):
		r.Met = "aim"
	case reached(must):
		r.Met = "must"
	default:
		r.Met = "no"
	}
	return r
}

// WithFloor sets what the kernel alone takes.
func (r Row) WithFloor(v float64) Row { r.Floor = ptr(v); return r }

// Noted adds a remark for people.
func (r Row) Noted(note string) Row { r.Note = note; return r }

// With sets what was in force.
func (r Row) With(features []string) Row { r.Features = append([]string{}, features...); return r }

// Against sets the rival and its value.
func (r Row) Against(name string, v float64) Row {
	r.Rival, r.RivalValue = name, ptr(v)
	return r
}

// Details adds what the samples tell beside the median.
func (r Row) Details(s *Samples) Row {
	r.P99, r.Samples = ptr(s.P99()), len(s.Times)
	if s.CPU > 0 {
		r.CPU = ptr(s.CPUMS())
	}
	return r
}

// Rivalled is against where the rival was measured; see compact.
func (r Row) Rivalled(name string, s *Samples) Row {
	if s == nil {
		r.absent = true
		return r
	}
	r = r.Against(name, s.P50())
	r.Note = strings.TrimSpace(fmt.Sprintf("%s rival: p99 %.3g ms, CPU %.3g ms", r.Note, s.P99(), s.CPUMS()))
	return r
}

// Compact drops rows of absent rivals, but for one if all are absent.
func Compact(rows []Row) []Row {
	var kept []Row
	for _, r := range rows {
		if !r.absent {
			kept = append(kept, r)
		}
	}
	if len(kept) == 0 && len(rows) > 0 {
		kept = rows[:1]
	}
	return kept
}

// Report is where rows are written, for programs and for people.
type Report struct {
	JSON, Markdown string // paths
	Title          string
	Command        string // which writes it
	Notes          string // below the table
}

// Write replaces both files. Rows of earlier runs stay where these have none of their
// ID: each says when and where it was measured.
func (p Report) Write(rows []Row) error {
	if err := os.MkdirAll(filepath.Dir(p.JSON), 0o755); err != nil {
		return err
	}
	rows, err := p.withEarlier(rows)
	if err != nil {
		return err
	}
	b, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	var text bytes.Buffer
	var hosts []string
	for _, r := range rows {
		if !slices.Contains(hosts, r.Host) {
			hosts = append(hosts, r.Host)
		}
	}
	fmt.Fprintf(&text, "# %s\n\nWritten by `%s`; edit nothing here. Host: %s.\n\n", p.Title, p.Command, strings.Join(hosts, "; "))
	markdown(&text, rows, p.Notes)
	return errors.Join(os.WriteFile(p.JSON, append(b, '\n'), 0o644), os.WriteFile(p.Markdown, text.Bytes(), 0o644))
}

// withEarlier is rows, after those in the file that they do not replace.
func (p Report) withEarlier(rows []Row) ([]Row, error) {
	b, err := os.ReadFile(p.JSON)
	if errors.Is(err, os.ErrNotExist) {
		return rows, nil
	}
	var earlier []Row
	if err == nil {
		err = json.Unmarshal(b, &earlier)
	}
	if err != nil {
		return nil, fmt.Errorf("earlier rows: %w", err)
	}
	earlier = slices.DeleteFunc(earlier, func(e Row) bool { return slices.ContainsFunc(rows, func(r Row) bool { return r.ID == e.ID }) })
	return append(earlier, rows...), nil
}

func markdown(w io.Writer, rows []Row, notes string) {
	fmt.Fprintln(w, "| id | what | value | p99 | CPU ms | floor | rival | its value | must / aim | met | load | at |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|---|---|---|---|---|---|")
	for _, r := range rows {
		fmt.Fprintf(w, "| %s | %s | %s %s | %s | %s | %s | %s | %s | %s / %s | %s | %.2f | %s |\n", r.ID, r.What, number(&r.Value), r.Unit,
			number(r.P99), number(r.CPU), number(r.Floor), r.Rival, number(r.RivalValue), number(r.Must), number(r.Aim), r.Met, r.Load, r.Time)
	}
	fmt.Fprintln(w, "\nIn force in every sandbox measured:", strings.Join(rows[0].Features, ", ")+".")
	fmt.Fprintln(w, "\n"+notes)
	for _, r := range rows {
		if r.Note != "" {
			fmt.Fprintf(w, "\n- %s %s: %s\n", r.ID, r.Rival, r.Note)
		}
	}
}

func number(v *float64) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%.4g", *v)
}

// Print shows rows on a terminal.
func Print(w io.Writer, rows []Row) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tVALUE\tP99\tCPU MS\tRIVAL\tITS VALUE\tMUST / AIM\tMET")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s %s\t%s\t%s\t%s\t%s\t%s / %s\t%s\n", r.ID, number(&r.Value), r.Unit, number(r.P99), number(r.CPU), r.Rival, number(r.RivalValue), number(r.Must), number(r.Aim), r.Met)
	}
	_ = t.Flush()
	for _, r := range rows {
		if r.Note != "" {
			fmt.Fprintf(w, "%s %s: %s\n", r.ID, r.Rival, r.Note)
		}
	}
}
