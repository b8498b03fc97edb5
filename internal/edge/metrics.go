package edge

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// metrics counts what the edge does. Labels come from closed lists: kinds,
// codes, reasons; never from a caller.
type metrics struct {
	creates *prometheus.CounterVec
	create  *prometheus.HistogramVec
	execs   *prometheus.CounterVec
	exec    prometheus.Histogram
	errors  *prometheus.CounterVec
	kills   *prometheus.CounterVec
	failed  prometheus.Counter
	paused  prometheus.Counter
	resumed prometheus.Counter
	stuck   prometheus.Counter
	starved prometheus.Counter
}

// buckets reach from 0.25 ms to 65 s.
var buckets = prometheus.ExponentialBuckets(0.00025, 2, 19)

func newMetrics(e *Edge) *metrics {
	m := &metrics{
		creates: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_edge_creates_total", Help: "Creates that ended, by backend, launch (warm, cold) and code (ok or an error's)."}, []string{"backend", "launch", "code"}),
		create:  prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dsec_edge_create_seconds", Help: "Time of the creates that succeeded.", Buckets: buckets}, []string{"backend"}),
		execs:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_edge_commands_total", Help: "Commands that ended, by how: ok, code, signal, oom, timed_out, output_limit."}, []string{"end"}),
		exec:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_edge_command_seconds", Help: "Time of the commands that ended.", Buckets: buckets}),
		errors:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_edge_errors_total", Help: "Requests that ended in an error, by code."}, []string{"code"}),
		kills:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_edge_kills_total", Help: "Sandboxes ended on purpose, by reason."}, []string{"reason"}),
		failed:  prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_edge_failed_total", Help: "Sandboxes of which PID 1 ended by itself."}),
		paused:  prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_edge_pauses_total", Help: "Sandboxes paused."}),
		resumed: prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_edge_resumes_total", Help: "Sandboxes resumed."}),
		stuck:   prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_edge_stuck_total", Help: "Attempts to free a sandbox that failed."}),
		starved: prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_edge_starved_commands_total", Help: "Commands whose end was not told, because the disk of all sandboxes was full, or commands were killed for the sake of the node, while they ran."}),
	}
	if e.cfg.Metrics != nil {
		live := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_edge_sandboxes", Help: "Sandboxes that hold objects of this node."}, func() float64 {
			e.mu.RLock()
			defer e.mu.RUnlock()
			return float64(e.live)
		})
		calls := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_edge_calls", Help: "Requests in progress."}, func() float64 { return float64(e.calls.Load()) })
		e.cfg.Metrics.MustRegister(m.creates, m.create, m.execs, m.exec, m.errors, m.kills, m.failed, m.paused, m.resumed, m.stuck, m.starved, live, calls, diskSpace{e})
	}
	return m
}

// diskSpace tells how full the disk is that the sandboxes of a backend share.
type diskSpace struct{ e *Edge }

var diskSpaceDesc = prometheus.NewDesc("dsec_edge_disk_bytes",
	"The disk that the sandboxes of a backend share: its size, what is used, what is allocated (used or set apart), and what can still be written (free).",
	[]string{"backend", "part"}, nil)

// Describe implements prometheus.Collector.
func (diskSpace) Describe(ch chan<- *prometheus.Desc) { ch <- diskSpaceDesc }

// Collect implements prometheus.Collector.
func (d diskSpace) Collect(ch chan<- prometheus.Metric) {
	if !d.e.ready.Load() {
		return // the backends are not known yet
	}
	for _, kind := range d.e.kinds {
		shared, ok := d.e.backends[kind].Backend.(backend.DiskSharer)
		if !ok {
			continue
		}
		space, ok, err := shared.DiskSpace()
		if err != nil {
			d.e.log.Warn("space of the disk is not known", "backend", kind, "err", err)
		}
		if !ok || err != nil {
			continue
		}
		for part, n := range map[string]int64{"size": space.Size, "used": space.Used, "allocated": space.Allocated, "free": space.Free} {
			ch <- prometheus.MustNewConstMetric(diskSpaceDesc, prometheus.GaugeValue, float64(n), string(kind), part)
		}
	}
}

func (m *metrics) created(kind dsec.Kind, warm bool, err error, d time.Duration) {
	code := "ok"
	if err != nil {
		code = string(dsec.CodeOf(err))
	} else {
		m.create.WithLabelValues(string(kind)).Observe(d.Seconds())
	}
	m.creates.WithLabelValues(string(kind), launch(warm), code).Inc()
}

func launch(warm bool) string {
	if warm {
		return "warm"
	}
	return "cold"
}

func (m *metrics) killed(reason string) {
	switch reason {
	case reasonKilled, reasonIdle, reasonLifetime:
	default:
		reason = "other"
	}
	m.kills.WithLabelValues(reason).Inc()
}

func (m *metrics) command(o dsec.Outcome) {
	end := "code"
	switch {
	case o.OOM:
		end = "oom"
	case o.TimedOut:
		end = "timed_out"
	case o.OutputLimit:
		end = "output_limit"
	case o.Signal != 0:
		end = "signal"
	case o.Code == 0:
		end = "ok"
	}
	m.execs.WithLabelValues(end).Inc()
	m.exec.Observe(o.Duration.Seconds())
}
