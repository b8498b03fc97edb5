package container

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/chronusapi"
)

// phases are the times between the steps of a create, by the crash hook.
type phases struct {
	last  time.Time
	step  string
	times map[string][]time.Duration
	order []string
}

func (p *phases) at(step string) {
	now := time.Now()
	if p.step != "" {
		if p.times[p.step] == nil {
			p.order = append(p.order, p.step)
		}
		p.times[p.step] = append(p.times[p.step], now.Sub(p.last))
	}
	p.step, p.last = step, now
}

func (p *phases) report(b *testing.B) {
	for _, step := range p.order {
		b.Logf("%-14s p50 %7.0f us", step, median(p.times[step]))
	}
}

func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2].Nanoseconds()) / 1e3
}

// BenchmarkLife makes a sandbox, runs one command and destroys it.
func BenchmarkLife(b *testing.B) {
	for _, warm := range []int{0, 4} {
		b.Run(fmt.Sprintf("warm=%d", warm), func(b *testing.B) {
			p := &phases{times: map[string][]time.Duration{}}
			h := newHost(b, func(c *Config) {
				c.Warm = warm
				if warm == 0 {
					c.Crash = p.at
				}
			})
			cpu0 := cpuTime(b)
			var create, exec, destroy []time.Duration
			for b.Loop() {
				h.awaitWarm(warm) // the refill is not on this path
				p.step = ""
				t0 := time.Now()
				i, err := h.b.Create(b.Context(), h.request())
				if err != nil {
					b.Fatal(err)
				}
				p.at("end")
				t1 := time.Now()
				c := chronusapi.NewClient(i.Dial)
				if out := (&sandbox{host: h, i: i, client: c}).run("/bin/true"); out.Code != 0 {
					b.Fatal(out)
				}
				t2 := time.Now()
				c.Close()
				p.step = ""
				if err := i.Destroy(b.Context()); err != nil {
					b.Fatal(err)
				}
				p.at("end")
				t3 := time.Now()
				create, exec, destroy = append(create, t1.Sub(t0)), append(exec, t2.Sub(t1)), append(destroy, t3.Sub(t2))
			}
			p.report(b)
			stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", h.b.launcher.run.cmd.Process.Pid))
			f := strings.Fields(string(stat))
			b.Log("launcher ticks: user, system, children's user, system:", f[13:17], "self", cpuTime(b)-cpu0)
			check(b, h.b.Close()) // so that the launcher's time, and its children's, are ours
			b.ReportMetric(float64((cpuTime(b)-cpu0).Microseconds())/float64(b.N), "cpu-us")
			b.ReportMetric(median(create), "create-us")
			b.ReportMetric(median(exec), "exec-us")
			b.ReportMetric(median(destroy), "destroy-us")
		})
	}
}

// cpuTime is what this process and the children it has waited for have used.
func cpuTime(b *testing.B) (d time.Duration) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		check(b, unix.Getrusage(who, &r))
		d += time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	return d
}
