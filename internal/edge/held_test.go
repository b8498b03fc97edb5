package edge_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestHeldOutput: past what all Exec calls may hold it is those of the sandbox
// that holds most that end, and none of them as if nothing had been done.
func TestHeldOutput(t *testing.T) {
	const most = 1 << 20
	const of = most / 4
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { *c = edge.WithTexts(*c, 1<<20, 1<<20, most, 1<<20) })
	hog, neighbour := n.create(&dsecv1.CreateRequest{}), n.create(&dsecv1.CreateRequest{})
	ended := make(chan error, 8)
	var hogs sync.WaitGroup
	for range cap(ended) {
		hogs.Go(func() {
			_, err := n.exec(hog, "sh", "-c", fmt.Sprintf("yes | head -c %d; sleep 600", of))
			ended <- err
		})
	}
	for range 4 { // five would be more than the most
		wantError(t, <-ended, dsec.CodeOutcomeUnknown, "")
	}
	res, err := n.exec(neighbour, "sh", "-c", fmt.Sprintf("yes | head -c %d", of/2))
	if err != nil || len(res.Stdout) != of/2 {
		t.Errorf("a neighbour's output of %d bytes: %v", of/2, err)
	}
	n.kill(hog)
	hogs.Wait()
	res, err = n.exec(neighbour, "sh", "-c", fmt.Sprintf("yes | head -c %d", most))
	if err != nil || len(res.Stdout) != most {
		t.Errorf("after the hog's end, %d bytes: %v", most, err)
	}
}

// TestHeldActionIsKilled: an action goes on without its caller, but not where its output
// was too much.
func TestHeldActionIsKilled(t *testing.T) {
	const most = 1 << 20
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { *c = edge.WithTexts(*c, 1<<20, 1<<20, most, 1<<20) })
	id := n.create(&dsecv1.CreateRequest{})
	exec := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: fmt.Sprintf("yes | head -c %d; sleep 600", 2*most)}}
	for range 2 { // the second is told what came of the first
		_, err := n.process.Exec(t.Context(), named(exec, "a"))
		if e := wantError(t, err, dsec.CodeOutcomeUnknown, ""); !strings.Contains(e.Message, "was killed") {
			t.Errorf("told %q", e.Message)
		}
	}
	if p := n.listedEnd(id, 1); p.Outcome != nil || !strings.Contains(p.Fault, "was killed") {
		t.Errorf("the command: %v", p)
	}
}

// TestAnswersFromTheLogAreHeld: they count as other output does. What is told from the log
// makes way for a command of its sandbox, which could not be had again.
func TestAnswersFromTheLogAreHeld(t *testing.T) {
	const most = 1 << 20
	const of = most * 3 / 4
	const answer = most - of + 1 // too much beside that
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { *c = edge.WithTexts(*c, 1<<20, 1<<20, most, 1<<20) })
	id, neighbour := n.create(&dsecv1.CreateRequest{}), n.create(&dsecv1.CreateRequest{})
	once := func(id string) error {
		exec := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: fmt.Sprintf("yes | head -c %d", answer)}}
		res, err := n.process.Exec(t.Context(), named(exec, "a"))
		if err == nil && len(res.Msg.Stdout) != answer {
			t.Errorf("%d bytes, want %d", len(res.Msg.Stdout), answer)
		}
		return err
	}
	for range 2 {
		if err := errors.Join(once(id), once(neighbour)); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() {
		_, err := n.exec(id, "sh", "-c", fmt.Sprintf("yes | head -c %d; sleep 600", of))
		ended <- err
	}()
	testutil.WaitFor(t, 10*time.Second, "the output", func() error {
		if held := n.edge.Held(); held != of {
			return fmt.Errorf("%d bytes are held, want %d", held, of)
		}
		return nil
	})
	if err := once(id); err == nil {
		t.Fatal("more is held than the most")
	} else {
		wantError(t, err, dsec.CodeExhausted, "")
	}
	if err := once(neighbour); err != nil {
		t.Fatalf("an answer of a neighbour: %v", err)
	}
	wantError(t, <-ended, dsec.CodeOutcomeUnknown, "")
	res, err := n.exec(id, "sh", "-c", fmt.Sprintf("yes | head -c %d", most))
	if err != nil || len(res.Stdout) != most {
		t.Errorf("afterwards, %d bytes: %v", most, err)
	}
}

// TestRecordsAreBounded: long labels do not make the records of ended sandboxes,
// or of the others, grow without end, also over a restart.
func TestRecordsAreBounded(t *testing.T) {
	const live, ended = 400 << 10, 100 << 10
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { *c = edge.WithTexts(*c, live, ended, 1<<20, 1<<20) })
	long := map[string]string{}
	for i := range 64 {
		long[fmt.Sprint(i)] = strings.Repeat("\u00e9", 256) // 33 KiB
	}
	var ids []string
	for range 8 {
		id := n.create(&dsecv1.CreateRequest{Labels: long, RequestId: fmt.Sprint(len(ids))})
		n.kill(id)
		ids = append(ids, id)
	}
	check := func() {
		t.Helper()
		for i, id := range ids {
			_, err := n.GetSandbox(t.Context(), connect.NewRequest(&dsecv1.GetRequest{SandboxId: id}))
			if kept := i >= len(ids)-3; kept != (err == nil) {
				t.Errorf("sandbox %d: %v, want the last three alone", i, err)
			}
		}
	}
	check()
	n.restart()
	check()
	for i := range 40 {
		_, err := n.tryCreate(&dsecv1.CreateRequest{Labels: long})
		if err == nil {
			continue
		}
		if wantError(t, err, dsec.CodeExhausted, ""); i < 8 || i > 12 {
			t.Errorf("%d sandboxes of 33 KiB in %d", i, live)
		}
		return
	}
	t.Error("records of live sandboxes have no bound")
}

// TestLabelsInAll: labels that are few and short, but of long characters.
func TestLabelsInAll(t *testing.T) {
	n := newNode(t, nil)
	long := map[string]string{}
	for i := range 64 {
		long[fmt.Sprint(i)] = strings.Repeat("\U0001F600", 256)
	}
	_, err := n.tryCreate(&dsecv1.CreateRequest{Labels: long})
	wantError(t, err, dsec.CodeInvalid, "labels")
	n.left(0)
}

// TestPagesAreBounded: a page of sandboxes with long labels ends early, and all
// are listed.
func TestPagesAreBounded(t *testing.T) {
	const count, page = 20, 200 << 10
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { *c = edge.WithTexts(*c, 4<<20, 4<<20, 1<<20, page) })
	long := &dsecv1.CreateRequest{Labels: map[string]string{}}
	for i := range 64 {
		long.Labels[fmt.Sprint(i)] = strings.Repeat("\u6c34", 256)
	}
	for range count {
		n.create(proto.CloneOf(long))
	}
	seen, pages := map[string]bool{}, 0
	for req := (&dsecv1.ListRequest{PageSize: 1000}); ; pages++ {
		res, err := n.ListSandboxes(t.Context(), connect.NewRequest(req))
		if err != nil {
			t.Fatal(err)
		}
		if size := proto.Size(res.Msg); size > 2*page {
			t.Errorf("a page of %d bytes", size)
		}
		for _, s := range res.Msg.Sandboxes {
			seen[s.Id] = true
		}
		if req.PageToken = res.Msg.NextPageToken; req.PageToken == "" {
			break
		}
	}
	if len(seen) != count || pages == 0 {
		t.Errorf("%d sandboxes on %d pages, want %d on several", len(seen), pages+1, count)
	}
}
