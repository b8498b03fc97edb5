package edge_test

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func TestCreateRefusesBadRequests(t *testing.T) {
	made := 0
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		o.OnCreate = func(context.Context, backend.CreateRequest) error { made++; return nil }
	})
	for what, c := range map[string]struct {
		req   *dsecv1.CreateRequest
		code  dsec.Code
		field string
	}{
		"unknown backend":        {&dsecv1.CreateRequest{Backend: "docker"}, dsec.CodeUnsupported, "backend"},
		"default backend":        {&dsecv1.CreateRequest{Backend: "container"}, dsec.CodeUnsupported, "backend"},
		"negative cpu":           {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{MilliCpu: -1}}, dsec.CodeInvalid, "limits.milli_cpu"},
		"too little cpu":         {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{MilliCpu: 1}}, dsec.CodeInvalid, "limits.milli_cpu"},
		"negative memory":        {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{MemoryBytes: -1}}, dsec.CodeInvalid, "limits.memory_bytes"},
		"2^63-1 memory":          {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{MemoryBytes: math.MaxInt64}}, dsec.CodeInvalid, "limits.memory_bytes"},
		"disk above the node's":  {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{DiskBytes: 1 << 50}}, dsec.CodeInvalid, "limits.disk_bytes"},
		"inodes above the most":  {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{DiskInodes: 1 << 40}}, dsec.CodeInvalid, "limits.disk_inodes"},
		"min pids":               {&dsecv1.CreateRequest{Limits: &dsecv1.Limits{Pids: math.MinInt64}}, dsec.CodeInvalid, "limits.pids"},
		"negative idle timeout":  {&dsecv1.CreateRequest{IdleTimeout: &durationpb.Duration{Seconds: -1}}, dsec.CodeInvalid, "idle_timeout"},
		"idle timeout of no sum": {&dsecv1.CreateRequest{IdleTimeout: &durationpb.Duration{Seconds: 1, Nanos: -1}}, dsec.CodeInvalid, "idle_timeout"},
		"endless lifetime":       {&dsecv1.CreateRequest{MaxLifetime: &durationpb.Duration{Seconds: math.MaxInt64}}, dsec.CodeInvalid, "max_lifetime"},
		"layer that is not":      {&dsecv1.CreateRequest{Layers: []string{"sha256:" + strings.Repeat("a", 64)}}, dsec.CodeNotFound, "layers[0]"},
		"100 layers":             {&dsecv1.CreateRequest{Layers: make([]string, 100)}, dsec.CodeInvalid, "layers"},
		"env name with =":        {&dsecv1.CreateRequest{Env: map[string]string{"A=B": "c"}}, dsec.CodeInvalid, "env"},
		"env without name":       {&dsecv1.CreateRequest{Env: map[string]string{"": "c"}}, dsec.CodeInvalid, "env"},
		"env name with newline":  {&dsecv1.CreateRequest{Env: map[string]string{"A\nB": "c"}}, dsec.CodeInvalid, "env"},
		"env value with NUL":     {&dsecv1.CreateRequest{Env: map[string]string{"A": "b\x00c"}}, dsec.CodeInvalid, "env"},
		"huge env":               {&dsecv1.CreateRequest{Env: map[string]string{"A": strings.Repeat("x", 1<<20)}}, dsec.CodeInvalid, "env"},
		"user without a name":    {&dsecv1.CreateRequest{User: ":0"}, dsec.CodeInvalid, "user"},
		"user without its group": {&dsecv1.CreateRequest{User: "root:"}, dsec.CodeInvalid, "user"},
		"uid above the most":     {&dsecv1.CreateRequest{User: "65536"}, dsec.CodeInvalid, "user"},
		"gid above the most":     {&dsecv1.CreateRequest{User: "0:70000"}, dsec.CodeInvalid, "user"},
		"negative uid":           {&dsecv1.CreateRequest{User: "-1"}, dsec.CodeInvalid, "user"},
		"user with newline":      {&dsecv1.CreateRequest{User: "root\n"}, dsec.CodeInvalid, "user"},
		"relative workdir":       {&dsecv1.CreateRequest{Workdir: "tmp"}, dsec.CodeInvalid, "workdir"},
		"workdir with NUL":       {&dsecv1.CreateRequest{Workdir: "/tmp\x00"}, dsec.CodeInvalid, "workdir"},
		"long request id":        {&dsecv1.CreateRequest{RequestId: strings.Repeat("x", 129)}, dsec.CodeInvalid, "request_id"},
		"request id with NUL":    {&dsecv1.CreateRequest{RequestId: "a\x00"}, dsec.CodeInvalid, "request_id"},
		"label without name":     {&dsecv1.CreateRequest{Labels: map[string]string{"": "x"}}, dsec.CodeInvalid, "labels"},
		"job with newline":       {&dsecv1.CreateRequest{Job: "a\nb"}, dsec.CodeInvalid, "job"},
		"a network":              {&dsecv1.CreateRequest{NetworkRules: map[string]bool{"npm": false, "pypi": true}}, dsec.CodeUnsupported, "network_rules"},
	} {
		_, err := n.tryCreate(c.req)
		t.Run(what, func(t *testing.T) { wantError(t, err, c.code, c.field) })
	}
	if made != 0 || n.edge.Live() != 0 {
		t.Errorf("refused creates reached the backend %d times and hold %d places", made, n.edge.Live())
	}
	if _, err := n.tryCreate(&dsecv1.CreateRequest{NetworkRules: map[string]bool{"npm": false}}); err != nil {
		t.Errorf("all rules false: %v", err)
	}
}

// TestRangeOfALimit: the unit is told once.
func TestRangeOfALimit(t *testing.T) {
	n := newNode(t, nil)
	for _, c := range []struct {
		limits *dsecv1.Limits
		field  string
		want   string
	}{
		{&dsecv1.Limits{Pids: 3}, "limits.pids", `^want 8 to \d+ processes and threads, got 3$`},
		{&dsecv1.Limits{MemoryBytes: 1 << 20}, "limits.memory_bytes", `^want 8388608 \(8 MiB\) to \d+ \(.*\), got 1048576 \(1 MiB\)$`},
		{&dsecv1.Limits{MilliCpu: 1}, "limits.milli_cpu", `^want 10 \(0.01 CPUs\) to \d+ \(.* CPUs\), got 1 \(0.001 CPUs\)$`},
	} {
		_, err := n.tryCreate(&dsecv1.CreateRequest{Limits: c.limits})
		if e := wantError(t, err, dsec.CodeInvalid, c.field); !regexp.MustCompile(c.want).MatchString(e.Message) {
			t.Errorf("%s: %s", c.field, e.Message)
		}
	}
}

// TestMostOfTheSharedDisk: a limit that the disk of all has no place for is refused,
// and what the node gives by default is no more than that.
func TestMostOfTheSharedDisk(t *testing.T) {
	for most, want := range map[int64]int64{0: 4 << 30, 5 << 30: 4 << 30, 3 << 30: 3 << 30} {
		n := newNode(t, func(_ *edge.Config, o *fake.Options) { o.DiskMost = most })
		id := n.create(&dsecv1.CreateRequest{})
		if got := n.get(id).Limits.DiskBytes; got != want {
			t.Errorf("of %d: %d by default, want %d", most, got, want)
		}
		_, err := n.tryCreate(&dsecv1.CreateRequest{Limits: &dsecv1.Limits{DiskBytes: 6 << 30}})
		if most == 0 {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		e := wantError(t, err, dsec.CodeInvalid, "limits.disk_bytes")
		if text := fmt.Sprintf("want 1048576 (1 MiB) to %d (%d GiB), got %d (6 GiB)", most, most>>30, int64(6<<30)); e.Message != text {
			t.Errorf("%q, want %q", e.Message, text)
		}
	}
}

// TestCreateAgainOnALessDisk: who asks again for a sandbox that is there gets it,
// also where the disk has no place for another such one meanwhile.
func TestCreateAgainOnALessDisk(t *testing.T) {
	n := newNode(t, func(_ *edge.Config, o *fake.Options) { o.DiskMost = 3 << 30 })
	req := &dsecv1.CreateRequest{RequestId: "r", Limits: &dsecv1.Limits{DiskBytes: 2 << 30}}
	id := n.create(req)
	n.opts.DiskMost = 1 << 30
	n.restart()
	if got, err := n.tryCreate(req); err != nil || got.Id != id {
		t.Errorf("asked again: %v, %v, want %s", got, err, id)
	}
	req.RequestId = "s"
	_, err := n.tryCreate(req)
	wantError(t, err, dsec.CodeInvalid, "limits.disk_bytes")
}

func TestHeaderAndOwnership(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	foreign := connect.NewRequest(&dsecv1.GetRequest{SandboxId: id})
	foreign.Header().Set("Dsec-Project", "p2")
	_, err := n.GetSandbox(t.Context(), foreign)
	wantError(t, err, dsec.CodeNotFound, "sandbox_id")
	foreignExec := connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"true"}}})
	foreignExec.Header().Set("Dsec-Project", "p2")
	_, err = n.process.Exec(t.Context(), foreignExec)
	wantError(t, err, dsec.CodeNotFound, "sandbox_id")
	bare := connect.NewRequest(&dsecv1.GetRequest{SandboxId: id})
	bare.Header()["Dsec-Project"] = nil
	_, err = n.GetSandbox(t.Context(), bare)
	wantError(t, err, dsec.CodeDenied, "")
	for _, bad := range []string{"", "../x", "%2e%2e", "a\x00b", ".", "-rf", strings.Repeat("a", 300), "ünï"} {
		_, err := n.exec(bad, "true")
		wantError(t, err, dsec.CodeInvalid, "sandbox_id")
	}
	_, err = n.exec(string(dsec.NewSandboxID("aaaaa")), "true")
	wantError(t, err, dsec.CodeNotFound, "sandbox_id")
}

func TestSameRequestIDMakesOne(t *testing.T) {
	begun, goOn := make(chan struct{}, 10), make(chan struct{})
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		o.OnCreate = func(context.Context, backend.CreateRequest) error {
			begun <- struct{}{}
			<-goOn
			return nil
		}
	})
	req := func(job string) *dsecv1.CreateRequest { return &dsecv1.CreateRequest{RequestId: "r1", Job: job} }
	ids := make(chan string, 10)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			s, err := n.tryCreate(req("a"))
			if err != nil {
				t.Error(err)
				return
			}
			ids <- s.Id
		})
	}
	<-begun
	_, err := n.tryCreate(req("b"))
	wantError(t, err, dsec.CodeConflict, "request_id")
	close(goOn)
	wg.Wait()
	first := <-ids
	for range 9 {
		if id := <-ids; id != first {
			t.Errorf("second sandbox %s for one request id", id)
		}
	}
	if len(n.opts.World.IDs()) != 1 {
		t.Errorf("%d sandboxes were made", len(n.opts.World.IDs()))
	}
	found, err := n.FindRequest(t.Context(), connect.NewRequest(&dsecv1.FindRequestRequest{RequestId: "r1"}))
	if err != nil || found.Msg.SandboxId != first {
		t.Errorf("found %q, %v; want %s", found.Msg.GetSandboxId(), err, first)
	}
	// The key is kept after the end, and over a restart.
	n.kill(first)
	n.restart()
	s, err := n.tryCreate(req("a"))
	if err != nil || s.Id != first || s.State != "stopped" {
		t.Errorf("after the end: %+v, %v; want the stopped one", s, err)
	}
	// Another project's key is another key.
	other := connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{{Request: &dsecv1.CreateRequest{Backend: "fake", RequestId: "r1", Job: "b"}}}})
	other.Header().Set("Dsec-Project", "p2")
	res, err := n.CreateSandboxes(t.Context(), other)
	if err != nil || res.Msg.Items[0].GetCreated() == nil {
		t.Errorf("project p2: %v, %v", res, err)
	}
}

func TestFailedCreateFreesItsRequestID(t *testing.T) {
	fail := true
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		o.OnCreate = func(context.Context, backend.CreateRequest) error {
			if fail {
				return dsec.Errorf(dsec.CodeExhausted, "no more of them")
			}
			return nil
		}
	})
	_, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"})
	if e := wantError(t, err, dsec.CodeExhausted, ""); e.Message != "no more of them" {
		t.Errorf("message %q", e.Message)
	}
	if n.edge.Live() != 0 {
		t.Errorf("%d places are held", n.edge.Live())
	}
	fail = false
	if _, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"}); err != nil {
		t.Errorf("second try: %v", err)
	}
}

func TestBatchHasOneResultEach(t *testing.T) {
	n := newNode(t, func(c *edge.Config, o *fake.Options) { c.MaxSandboxes = 20 })
	var items []*dsecv1.CreateSandboxesItem
	for i := range 30 {
		r := &dsecv1.CreateRequest{Backend: "fake", RequestId: fmt.Sprint("batch/", i)}
		if i%10 == 3 {
			r.Workdir = "relative"
		}
		items = append(items, &dsecv1.CreateSandboxesItem{Request: r})
	}
	res, err := n.CreateSandboxes(t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: items}))
	if err != nil {
		t.Fatal(err)
	}
	ok, exhausted := 0, 0
	for i, item := range res.Msg.Items {
		e := item.GetError()
		switch {
		case i%10 == 3:
			wantError(t, apierr.FromDetail(e.GetDetail(), e.GetMessage()), dsec.CodeInvalid, "workdir")
		case e == nil:
			ok++
		default:
			wantError(t, apierr.FromDetail(e.Detail, e.Message), dsec.CodeExhausted, "")
			if !e.Detail.Retryable {
				t.Error("exhausted is not marked retryable")
			}
			exhausted++
		}
	}
	if ok != 20 || exhausted != 7 {
		t.Errorf("%d made and %d refused, want 20 and 7", ok, exhausted)
	}
}

func TestLittleDiskRefusesCreates(t *testing.T) {
	n := newNode(t, func(c *edge.Config, o *fake.Options) { c.MinFreeBytes = 1 << 60 })
	_, err := n.tryCreate(&dsecv1.CreateRequest{})
	wantError(t, err, dsec.CodeExhausted, "")
}

func TestListPagesAndFilters(t *testing.T) {
	n := newNode(t, nil)
	want := map[string]bool{}
	for i := range 7 {
		id := n.create(&dsecv1.CreateRequest{Job: fmt.Sprint("job", i%2), Labels: map[string]string{"i": fmt.Sprint(i)}})
		want[id] = true
	}
	list := func(req *dsecv1.ListRequest) (ids []string) {
		for {
			res, err := n.ListSandboxes(t.Context(), connect.NewRequest(req))
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range res.Msg.Sandboxes {
				ids = append(ids, s.Id)
			}
			if req.PageToken = res.Msg.NextPageToken; req.PageToken == "" {
				return ids
			}
		}
	}
	all := list(&dsecv1.ListRequest{PageSize: 2})
	for i, id := range all {
		if !want[id] || i > 0 && all[i-1] >= id {
			t.Errorf("%s is unknown or not in order", id)
		}
	}
	if len(all) != 7 {
		t.Errorf("%d listed, want 7", len(all))
	}
	if got := list(&dsecv1.ListRequest{Job: "job1"}); len(got) != 3 {
		t.Errorf("%d of job1, want 3", len(got))
	}
	if got := list(&dsecv1.ListRequest{Job: "job1", Labels: map[string]string{"i": "3"}}); len(got) != 1 {
		t.Errorf("%d of job1 with label, want 1", len(got))
	}
	n.kill(all[0])
	if got := list(&dsecv1.ListRequest{}); len(got) != 6 {
		t.Errorf("%d that have not ended, want 6", len(got))
	}
	if got := list(&dsecv1.ListRequest{States: []string{"stopped"}}); len(got) != 1 || got[0] != all[0] {
		t.Errorf("stopped: %v, want %s", got, all[0])
	}
	_, err := n.ListSandboxes(t.Context(), connect.NewRequest(&dsecv1.ListRequest{States: []string{"running", "asleep"}}))
	wantError(t, err, dsec.CodeInvalid, "states[1]")
	_, err = n.ListSandboxes(t.Context(), connect.NewRequest(&dsecv1.ListRequest{PageSize: 1001}))
	wantError(t, err, dsec.CodeInvalid, "page_size")
	_, err = n.ListSandboxes(t.Context(), connect.NewRequest(&dsecv1.ListRequest{PageToken: "../x"}))
	wantError(t, err, dsec.CodeInvalid, "page_token")
}

// A request id is counted in characters, as its field says.
func TestRequestIDsAreCountedInCharacters(t *testing.T) {
	n := newNode(t, nil)
	long := strings.Repeat("é", 128)
	first := n.create(&dsecv1.CreateRequest{RequestId: long})
	if again := n.create(&dsecv1.CreateRequest{RequestId: long}); again != first {
		t.Errorf("the same request id made %s and %s", first, again)
	}
	_, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: long + "é"})
	wantError(t, err, dsec.CodeInvalid, "request_id")
}
