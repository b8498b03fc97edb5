package main

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/units"
)

func runStats(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "stats")
	c, ids, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	var views []usageView
	var rows [][]string
	for _, id := range ids {
		u, err := c.Sandbox(id).Usage(ctx)
		if err != nil {
			return err
		}
		views = append(views, viewUsage(id, u))
		rows = append(rows, usageRow(id, u))
	}
	return f.print(views, "ID CPU MEMORY PEAK DISK FILES PROCESSES OOM", rows)
}

// usageView is what a sandbox uses, as the CLI shows it.
type usageView struct {
	ID               string  `json:"id"`
	CPUSeconds       float64 `json:"cpu_seconds"`
	ThrottledSeconds float64 `json:"cpu_throttled_seconds"`
	MilliCPU         int64   `json:"milli_cpu_limit"`
	MemoryBytes      int64   `json:"memory_bytes"`
	MemoryPeak       int64   `json:"memory_peak_bytes"`
	MemoryLimit      int64   `json:"memory_limit_bytes"`
	DiskBytes        int64   `json:"disk_bytes"`
	DiskInodes       *int64  `json:"disk_inodes,omitempty"` // where they are counted
	DiskLimit        int64   `json:"disk_limit_bytes"`
	Pids             int64   `json:"pids"`
	PidsLimit        int64   `json:"pids_limit"`
	OOMKills         int64   `json:"oom_kills"`
}

func viewUsage(id string, u dsec.Usage) usageView {
	return usageView{
		id, u.CPU.Seconds(), u.CPUThrottled.Seconds(), u.MilliCPU, u.MemoryBytes, u.MemoryPeak, u.MemoryLimit,
		u.DiskBytes, counted(u.DiskInodes), u.DiskLimit, u.Pids, u.PidsLimit, u.OOMKills,
	}
}

// counted is nil for what the node does not count.
func counted(n int64) *int64 {
	if n == dsec.NotCounted {
		return nil
	}
	return &n
}

func usageRow(id string, u dsec.Usage) []string {
	files := "-"
	if n := counted(u.DiskInodes); n != nil {
		files = fmt.Sprint(*n)
	}
	return []string{
		id,
		u.CPU.Round(10 * time.Millisecond).String(),
		units.Bytes(u.MemoryBytes) + "/" + units.Bytes(u.MemoryLimit),
		units.Bytes(u.MemoryPeak),
		units.Bytes(u.DiskBytes) + "/" + units.Bytes(u.DiskLimit),
		files,
		fmt.Sprintf("%d/%d", u.Pids, u.PidsLimit),
		fmt.Sprint(u.OOMKills),
	}
}
