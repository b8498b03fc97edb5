package apiserver

import (
	"context"
	"encoding/base64"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// Page sizes of a list.
const (
	defaultPage = 100
	maxPage     = 1000
)

// List asks the edges one after the other, in the order of their IDs, which is
// the order of their sandboxes' IDs. An edge that cannot be reached fails the
// list: a part of it would look like the whole.
func (b sandboxService) List(ctx context.Context, req *connect.Request[dsecv1.ListRequest]) (*connect.Response[dsecv1.ListResponse], error) {
	msg := proto.CloneOf(req.Msg)
	switch {
	case msg.PageSize < 0 || msg.PageSize > maxPage:
		return nil, dsec.Invalid("page_size", "want 1 to %d, or 0 for %d", maxPage, defaultPage)
	case msg.PageSize == 0:
		msg.PageSize = defaultPage
	}
	from, token, err := parsePageToken(msg.PageToken)
	if err != nil {
		return nil, err
	}
	out := &dsecv1.ListResponse{}
	for _, edge := range b.s.edges.Edges() {
		id := edge.ID()
		if id < from {
			continue
		}
		if len(out.Sandboxes) > 0 && msg.PageSize == 0 {
			out.NextPageToken = pageToken(id, "")
			break
		}
		msg.PageToken = ""
		if id == from {
			msg.PageToken = token
		}
		res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.ListSandboxes, msg)
		if err != nil {
			return nil, err
		}
		out.Sandboxes = append(out.Sandboxes, res.Msg.Sandboxes...)
		if res.Msg.NextPageToken != "" {
			out.NextPageToken = pageToken(id, res.Msg.NextPageToken)
			break
		}
		msg.PageSize -= int32(len(res.Msg.Sandboxes))
	}
	return connect.NewResponse(out), nil
}

// A page token is the edge to go on with and that edge's own token.
func pageToken(id dsec.EdgeID, token string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(string(id) + "." + token))
}

func parsePageToken(s string) (dsec.EdgeID, string, error) {
	if s == "" {
		return "", "", nil
	}
	bad := dsec.Invalid("page_token", "want the next_page_token of an earlier answer")
	raw, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return "", "", bad
	}
	id, token, ok := strings.Cut(string(raw), ".")
	if !ok {
		return "", "", bad
	}
	if _, err := dsec.ParseEdgeID(id); err != nil {
		return "", "", bad
	}
	return dsec.EdgeID(id), token, nil
}
