package apiserver

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/internal/apierr"
)

type metrics struct {
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dsec_api_calls_total", Help: "Ended calls of the public API, by route and code.",
		}, []string{"route", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dsec_api_call_seconds", Help: "Time from the decoded request to the end of the answer.",
			Buckets: prometheus.ExponentialBuckets(0.0002, 4, 10),
		}, []string{"route"}),
	}
	if reg != nil {
		reg.MustRegister(m.calls, m.seconds)
	}
	return m
}

func (m *metrics) done(route string, start time.Time, err error) {
	m.seconds.WithLabelValues(route).Observe(time.Since(start).Seconds())
	m.refused(route, err)
}

// refused counts a call that ended before it was decoded; err nil is ok.
func (m *metrics) refused(route string, err error) {
	code := "ok"
	if err != nil {
		code = string(apierr.Safe(err).Code)
	}
	m.calls.WithLabelValues(route, code).Inc()
}
