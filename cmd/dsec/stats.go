package main

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
)

func runStats(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "stats")
	c, ids, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	type usageView struct {
		ID               string  `json:"id"`
		CPUSeconds       float64 `json:"cpu_seconds"`
		ThrottledSeconds float64 `json:"cpu_throttled_seconds"`
		MilliCPU         int64   `json:"milli_cpu_limit"`
		MemoryBytes      int64   `json:"memory_bytes"`
		MemoryPeak       int64   `json:"memory_peak_bytes"`
		MemoryLimit      int64   `json:"memory_limit_bytes"`
		DiskBytes        int64   `json:"disk_bytes"`
		DiskInodes       int64   `json:"disk_inodes"`
		DiskLimit        int64   `json:"disk_limit_bytes"`
		Pids             int64   `json:"pids"`
		PidsLimit        int64   `json:"pids_limit"`
		OOMKills         int64   `json:"oom_kills"`
	}
	var views []usageView
	var rows [][]string
	for _, id := range ids {
		u, err := c.Sandbox(id).Usage(ctx)
		if err != nil {
			return err
		}
		views = append(views, usageView{
			id, u.CPU.Seconds(), u.CPUThrottled.Seconds(), u.MilliCPU, u.MemoryBytes, u.MemoryPeak, u.MemoryLimit,
			u.DiskBytes, u.DiskInodes, u.DiskLimit, u.Pids, u.PidsLimit, u.OOMKills,
		})
		rows = append(rows, usageRow(id, u))
	}
	return f.print(views, "ID CPU MEMORY PEAK DISK FILES PROCESSES OOM", rows)
}

func usageRow(id string, u dsec.Usage) []string {
	return []string{
		id,
		u.CPU.Round(10 * time.Millisecond).String(),
		formatSize(u.MemoryBytes) + "/" + formatSize(u.MemoryLimit),
		formatSize(u.MemoryPeak),
		formatSize(u.DiskBytes) + "/" + formatSize(u.DiskLimit),
		fmt.Sprint(u.DiskInodes),
		fmt.Sprintf("%d/%d", u.Pids, u.PidsLimit),
		fmt.Sprint(u.OOMKills),
	}
}
