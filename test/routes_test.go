package test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/apiserver"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// row is how a route is called, and what its authorisation hangs on.
type row struct {
	// body is a request that succeeds for the owner, with %s for the sandbox's ID.
	body string
	// field names the ID in errors; empty where the route takes none.
	field string
	// admin routes are for admin keys only.
	admin bool
}

// rows has one row for each route; a route without one fails the test.
var rows = map[string]row{
	dsecv1connect.SandboxServiceCreateProcedure:      {body: `{"backend":"fake"}`},
	dsecv1connect.SandboxServiceBatchCreateProcedure: {body: `{"template":{"backend":"fake"},"count":1}`},
	dsecv1connect.SandboxServiceGetProcedure:         {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.SandboxServiceListProcedure:        {body: `{}`},
	dsecv1connect.SandboxServiceKillProcedure:        {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.SandboxServiceExtendProcedure:      {body: `{"sandboxId":"%s","idleTimeout":"60s"}`, field: "sandbox_id"},
	dsecv1connect.SandboxServiceUsageProcedure:       {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.SandboxServicePauseProcedure:       {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.SandboxServiceResumeProcedure:      {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},

	dsecv1connect.TrajectoryServiceListProcedure:       {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.TrajectoryServiceFollowProcedure:     {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.TrajectoryServiceReadOutputProcedure: {body: `{"sandboxId":"%s","seq":"1"}`, field: "sandbox_id"},

	dsecv1connect.JobServiceCreateJobProcedure: {body: `{"name":"j"}`},
	dsecv1connect.JobServiceGetJobProcedure:    {body: `{"name":"JOB"}`},
	dsecv1connect.JobServiceListJobsProcedure:  {body: `{}`},
	dsecv1connect.JobServiceHeartbeatProcedure: {body: `{"name":"JOB"}`},
	dsecv1connect.JobServicePauseJobProcedure:  {body: `{"name":"JOB"}`},
	dsecv1connect.JobServiceResumeJobProcedure: {body: `{"name":"JOB"}`},
	dsecv1connect.JobServiceKillJobProcedure:   {body: `{"name":"none"}`},
	dsecv1connect.JobServiceEndJobProcedure:    {body: `{"name":"JOB"}`},

	dsecv1connect.ProcessServiceExecProcedure:          {body: `{"sandboxId":"%s","command":{"argv":["true"]}}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceStartProcedure:         {body: `{"sandboxId":"%s","command":{"argv":["true"]}}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceAttachProcedure:        {body: `{"sandboxId":"%s","processId":"1"}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceListProcessesProcedure: {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceSignalProcedure:        {body: `{"sandboxId":"%s","processId":"1","signal":18}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceWriteStdinProcedure:    {body: `{"sandboxId":"%s","processId":"1","data":"YQ=="}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceStreamStdinProcedure:   {body: `{"sandboxId":"%s","processId":"1","data":"YQ=="}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceCloseStdinProcedure:    {body: `{"sandboxId":"%s","processId":"1"}`, field: "sandbox_id"},
	dsecv1connect.ProcessServiceResizeProcedure:        {body: `{"sandboxId":"%s","processId":"2","size":{"rows":3,"cols":4}}`, field: "sandbox_id"},

	dsecv1connect.SessionServiceOpenSessionProcedure:      {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.SessionServiceRunCommandProcedure:       {body: `{"sandboxId":"%s","sessionId":"SESSION","command":"true"}`, field: "sandbox_id"},
	dsecv1connect.SessionServiceRunCommandsProcedure:      {body: `{"sandboxId":"%s","sessionId":"SESSION","command":"true"}`, field: "sandbox_id"},
	dsecv1connect.SessionServiceInterruptCommandProcedure: {body: `{"sandboxId":"%s","sessionId":"SESSION"}`, field: "sandbox_id"},
	dsecv1connect.SessionServiceListSessionsProcedure:     {body: `{"sandboxId":"%s"}`, field: "sandbox_id"},
	dsecv1connect.SessionServiceCloseSessionProcedure:     {body: `{"sandboxId":"%s","sessionId":"SESSION"}`, field: "sandbox_id"},

	dsecv1connect.FileServiceStatProcedure:     {body: `{"sandboxId":"%s","path":{"path":"/"}}`, field: "sandbox_id"},
	dsecv1connect.FileServiceListDirProcedure:  {body: `{"sandboxId":"%s","path":{"path":"/"}}`, field: "sandbox_id"},
	dsecv1connect.FileServiceMkdirProcedure:    {body: `{"sandboxId":"%s","path":{"path":"/m"},"parents":true}`, field: "sandbox_id"},
	dsecv1connect.FileServiceRenameProcedure:   {body: `{"sandboxId":"%s","from":{"path":"/f"},"to":{"path":"/f"}}`, field: "sandbox_id"},
	dsecv1connect.FileServiceRemoveProcedure:   {body: `{"sandboxId":"%s","path":{"path":"/r"}}`, field: "sandbox_id"},
	dsecv1connect.FileServiceReadProcedure:     {body: `{"sandboxId":"%s","path":{"path":"/f"}}`, field: "sandbox_id"},
	dsecv1connect.FileServiceWriteProcedure:    {body: `{"open":{"sandboxId":"%s","path":{"path":"/w"}}}`, field: "open.sandbox_id"},
	dsecv1connect.FileServiceDownloadProcedure: {body: `{"sandboxId":"%s","path":{"path":"/f"}}`, field: "sandbox_id"},
	dsecv1connect.FileServiceUploadProcedure:   {body: `{"open":{"sandboxId":"%s","path":{"path":"/u"}}}`, field: "open.sandbox_id"},

	dsecv1connect.EventServiceWatchEventsProcedure: {body: `{}`},

	dsecv1connect.WebhookServiceCreateWebhookProcedure: {body: `{"url":"https://example.com/hook"}`},
	dsecv1connect.WebhookServiceGetWebhookProcedure:    {body: `{"id":"wh-0"}`},
	dsecv1connect.WebhookServiceListWebhooksProcedure:  {body: `{}`},
	dsecv1connect.WebhookServiceDeleteWebhookProcedure: {body: `{"id":"wh-0"}`},

	dsecv1connect.SnapshotServicePackProcedure:    {body: `{"sandboxId":"%s","name":"packed"}`, field: "sandbox_id"},
	dsecv1connect.SnapshotServiceForkProcedure:    {body: `{"sandboxId":"%s","count":2}`, field: "sandbox_id"},
	dsecv1connect.SnapshotServiceMigrateProcedure: {body: `{"sandboxId":"%s","loseMemory":true}`, field: "sandbox_id"},

	dsecv1connect.LayerServiceImportLayerProcedure:   {body: `{"open":{"name":"x"}}`},
	dsecv1connect.LayerServicePullLayerProcedure:     {body: `{"name":"x","ref":"no reference"}`},
	dsecv1connect.LayerServiceExportLayerProcedure:   {body: `{"layers":["none"]}`},
	dsecv1connect.LayerServicePrefetchLayerProcedure: {body: `{"name":"none"}`},
	dsecv1connect.LayerServiceListLayersProcedure:    {body: `{}`},
	dsecv1connect.LayerServiceInspectLayerProcedure:  {body: `{"name":"none"}`},
	dsecv1connect.LayerServiceTagLayerProcedure:      {body: `{"name":"none","newName":"n"}`},
	dsecv1connect.LayerServiceRemoveLayerProcedure:   {body: `{"name":"none"}`},

	dsecv1connect.AdminServiceCreateKeyProcedure:     {body: `{"project":"z"}`, admin: true},
	dsecv1connect.AdminServiceListKeysProcedure:      {body: `{}`, admin: true},
	dsecv1connect.AdminServiceRevokeKeyProcedure:     {body: `{"id":"000000000000"}`, admin: true},
	dsecv1connect.AdminServiceCollectLayersProcedure: {body: `{"dryRun":true}`, admin: true},
}

// mayFail are the routes whose body in rows does not succeed: it names what is
// not there, which shows that the call was let in.
var mayFail = map[string]dsec.Code{
	dsecv1connect.LayerServiceInspectLayerProcedure:       dsec.CodeNotFound,
	dsecv1connect.WebhookServiceGetWebhookProcedure:       dsec.CodeNotFound,
	dsecv1connect.LayerServiceTagLayerProcedure:           dsec.CodeNotFound,
	dsecv1connect.LayerServiceRemoveLayerProcedure:        dsec.CodeNotFound,
	dsecv1connect.LayerServiceImportLayerProcedure:        dsec.CodeInvalid, // an empty archive
	dsecv1connect.LayerServicePullLayerProcedure:          dsec.CodeInvalid,
	dsecv1connect.LayerServiceExportLayerProcedure:        dsec.CodeNotFound,
	dsecv1connect.LayerServicePrefetchLayerProcedure:      dsec.CodeNotFound,
	dsecv1connect.AdminServiceRevokeKeyProcedure:          dsec.CodeNotFound,
	dsecv1connect.SessionServiceInterruptCommandProcedure: dsec.CodeConflict, // it runs none
	dsecv1connect.TrajectoryServiceReadOutputProcedure:    dsec.CodeNotFound, // its first entry has none
}

// badIDs is S81.
var badIDs = []string{
	"", ".", "..", "../x", "%2e%2e", "-rf", "a\x00b", "é", "/etc/passwd", "AAAAAAAAAAAAAAAAAAAAAAAAA",
	strings.Repeat("a", 24), strings.Repeat("a", 26), strings.Repeat("a", 300), "aaaaa/aaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaa1", "aaaaaaaaaaaaaaaaaaaaaaa\u00e9",
}

// TestEveryRouteIsGuarded is S80, S81 and S37: every route of the API's
// descriptors against a caller without a key, with an expired and with an
// unknown one, of another project, with another sandbox and with IDs that are
// none; and, as the control, its owner.
func TestEveryRouteIsGuarded(t *testing.T) {
	s := up(t)
	owner, ownerKey := s.project(t, "owner")
	_, otherKey := s.project(t, "other")
	admin := readKey(t, s.keyFile)
	_, expiring, err := s.client(t).CreateKey(t.Context(), "owner", time.Now().Add(time.Second))
	check(t, err)
	expired := time.After(1100 * time.Millisecond) // the key's own life is counted in seconds
	seen := map[string]bool{}
	<-expired
	for route := range apiserver.Routes() {
		seen[route.Procedure] = true
		r, ok := rows[route.Procedure]
		if !ok {
			t.Errorf("%s has no row", route.Procedure)
			continue
		}
		t.Run(strings.TrimPrefix(route.Procedure, "/dsec.v1."), func(t *testing.T) {
			g := &guard{t: t, s: s, route: route, row: r}
			id, session := g.sandbox(owner)
			for name, key := range map[string]string{"no key": "", "expired": expiring, "unknown": "e2b_" + strings.Repeat("0", 40), "junk": "x y\tz"} {
				g.want(name, key, id, session, dsec.CodeUnauthenticated, 401)
			}
			if r.admin {
				g.want("not an admin", ownerKey, id, session, dsec.CodeDenied, 403)
				g.want("control", admin, id, session, mayFail[route.Procedure], 0)
				return
			}
			if r.field != "" {
				g.want("another project", otherKey, id, session, dsec.CodeNotFound, 404)
				g.want("an admin's own project", admin, id, session, dsec.CodeNotFound, 404)
				g.want("another sandbox", ownerKey, string(dsec.NewSandboxID(dsec.SandboxID(id).Edge())), session, dsec.CodeNotFound, 404)
				g.want("another node", ownerKey, string(dsec.NewSandboxID("zzzzz")), session, dsec.CodeNotFound, 404)
				for _, bad := range badIDs {
					g.want(fmt.Sprintf("ID %.30q", bad), ownerKey, bad, session, dsec.CodeInvalid, 400)
				}
			}
			g.want("control", ownerKey, id, session, mayFail[route.Procedure], 0)
		})
	}
	for procedure := range rows {
		if !seen[procedure] {
			t.Errorf("row for %s, which is no route", procedure)
		}
	}
}

func readKey(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	check(t, err)
	return strings.TrimSpace(string(data))
}

type guard struct {
	t     *testing.T
	s     *server
	route apiserver.Route
	row   row
}

// sandbox is one of the owner's with all that the bodies name: processes 1
// with an open input and 2 on a terminal, a session, and the files /f and /r.
func (g *guard) sandbox(c *client.Client) (id, session string) {
	t := g.t
	ctx := t.Context()
	sb, err := c.CreateSandbox(ctx, client.SandboxOptions{Backend: "fake"})
	check(t, err)
	t.Cleanup(func() { _ = sb.Kill(context.WithoutCancel(ctx)) })
	_, err = c.CreateJob(ctx, jobOf(string(sb.ID())), client.JobOptions{})
	check(t, err)
	open, stop := io.Pipe()
	t.Cleanup(func() { _ = stop.Close() })
	if g.row.field == "" {
		return string(sb.ID()), ""
	}
	// Process 1 ends where Attach waits for its end.
	if g.route.Procedure == dsecv1connect.ProcessServiceAttachProcedure {
		_, _, err = sb.Command("true").Output(ctx)
		check(t, err)
	} else {
		cmd := sb.Command("cat")
		cmd.Stdin = open
		check(t, cmd.Start(ctx))
		if cmd.Process().ID != 1 {
			t.Fatalf("first process is %d", cmd.Process().ID)
		}
	}
	tty := sb.Command("cat")
	tty.PTY, tty.Stdin = &client.WindowSize{Rows: 2, Cols: 2}, open
	check(t, tty.Start(ctx))
	check(t, sb.WriteFile(ctx, "/f", []byte("f"), 0))
	check(t, sb.WriteFile(ctx, "/r", nil, 0))
	n, err := sb.OpenSession(ctx, client.SessionOptions{})
	check(t, err)
	if g.route.Procedure == dsecv1connect.TrajectoryServiceFollowProcedure {
		check(t, sb.Kill(ctx)) // which ends the stream
	}
	return string(sb.ID()), n.ID()
}

// jobOf is the job that a sandbox of the tests has beside it.
func jobOf(id string) string { return "job of " + id }

// want calls the route. code empty is a success; status 0 is any.
func (g *guard) want(name, key, id, session string, code dsec.Code, status int) {
	g.t.Helper()
	quoted, err := json.Marshal(id)
	check(g.t, err)
	body := strings.NewReplacer("SESSION", session, "JOB", jobOf(id)).Replace(g.row.body)
	body = strings.ReplaceAll(body, `"%s"`, string(quoted))
	gotStatus, e := g.call(key, body)
	got := dsec.Code("")
	if e != nil {
		got = e.Code
	}
	if got != code {
		g.t.Errorf("%s: %v (%s), want %q", name, e, got, code)
		return
	}
	// Errors of a stream come in its body, with status 200.
	if status != 0 && !g.streams() && gotStatus != status {
		g.t.Errorf("%s: status %d, want %d", name, gotStatus, status)
	}
	if code == dsec.CodeInvalid && status == 400 && e.Field != g.row.field {
		g.t.Errorf("%s: names field %q, want %q", name, e.Field, g.row.field)
	}
	if e != nil && key != "" && strings.Contains(e.Message, key) {
		g.t.Errorf("%s: the error holds the key", name)
	}
}

func (g *guard) streams() bool { return g.route.ClientStreaming || g.route.ServerStreaming }

// call makes a raw call with JSON, over HTTP/2 where both sides stream.
func (g *guard) call(key, body string) (int, *dsec.Error) {
	g.t.Helper()
	contentType, data := "application/json", []byte(body)
	if g.streams() {
		contentType = "application/connect+json"
		data = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	}
	req, err := http.NewRequestWithContext(g.t.Context(), http.MethodPost, g.s.url+g.route.Procedure, bytes.NewReader(data))
	check(g.t, err)
	req.Header.Set("Content-Type", contentType)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	hc := http.DefaultClient
	if g.route.ClientStreaming && g.route.ServerStreaming {
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetUnencryptedHTTP2(true)
		defer tr.CloseIdleConnections()
		hc = &http.Client{Transport: tr}
	}
	res, err := hc.Do(req)
	check(g.t, err)
	defer func() { _ = res.Body.Close() }()
	if g.route.Procedure == dsecv1connect.EventServiceWatchEventsProcedure {
		return res.StatusCode, g.endOfStream(firstEnvelope(g.t, res.Body)) // else it does not end
	}
	answer, err := io.ReadAll(res.Body)
	check(g.t, err)
	if !g.streams() {
		if res.StatusCode == http.StatusOK {
			return res.StatusCode, nil
		}
		return res.StatusCode, g.typed(answer)
	}
	return res.StatusCode, g.endOfStream(answer)
}

// firstEnvelope is that of a stream, followed by an end in order where it is none itself.
func firstEnvelope(t *testing.T, r io.Reader) []byte {
	t.Helper()
	head := make([]byte, 5)
	_, err := io.ReadFull(r, head)
	check(t, err)
	msg := make([]byte, binary.BigEndian.Uint32(head[1:]))
	_, err = io.ReadFull(r, msg)
	check(t, err)
	all := append(head, msg...)
	if head[0]&2 == 0 {
		all = append(all, 2, 0, 0, 0, 2, '{', '}')
	}
	return all
}

// endOfStream is the error in a stream's last envelope.
func (g *guard) endOfStream(data []byte) *dsec.Error {
	g.t.Helper()
	for len(data) >= 5 {
		n := int(binary.BigEndian.Uint32(data[1:5]))
		flags, msg := data[0], data[5:5+n]
		data = data[5+n:]
		if flags&2 == 0 {
			continue
		}
		var end struct {
			Error json.RawMessage `json:"error"`
		}
		check(g.t, json.Unmarshal(msg, &end))
		if end.Error == nil {
			return nil
		}
		return g.typed(end.Error)
	}
	g.t.Fatalf("stream without an end")
	return nil
}

func (g *guard) typed(data []byte) *dsec.Error {
	g.t.Helper()
	var wire struct {
		Message string `json:"message"`
		Details []struct {
			Type  string `json:"type"`
			Value string `json:"value"`
		} `json:"details"`
	}
	check(g.t, json.Unmarshal(data, &wire))
	for _, d := range wire.Details {
		var detail dsecv1.ErrorDetail
		raw, err := base64.RawStdEncoding.DecodeString(d.Value)
		check(g.t, err)
		if d.Type == "dsec.v1.ErrorDetail" && proto.Unmarshal(raw, &detail) == nil {
			return &dsec.Error{Code: dsec.Code(detail.Code), Field: detail.Field, Message: wire.Message}
		}
	}
	g.t.Fatalf("error without a detail: %s", data)
	return nil
}
