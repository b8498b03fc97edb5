package client

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Webhook is an address that a project's events are posted to.
type Webhook struct {
	ID            string      `json:"id"`
	URL           string      `json:"url"`
	Filter        EventFilter `json:"filter"`
	Created       time.Time   `json:"created"`
	State         string      `json:"state"`     // ok, failing or disabled
	Delivered     int64       `json:"delivered"` // events that were taken
	GivenUp       int64       `json:"given_up"`
	LastDelivered time.Time   `json:"last_delivered,omitzero"`
	FailingSince  time.Time   `json:"failing_since,omitzero"`
	Error         string      `json:"error,omitempty"`
}

func webhookOf(m *dsecv1.Webhook) Webhook {
	f := m.GetFilter()
	out := Webhook{
		ID: m.GetId(), URL: m.GetUrl(), Created: timeOf(m.GetCreated()), State: m.GetState(), Delivered: m.GetDelivered(), GivenUp: m.GetGivenUp(),
		LastDelivered: timeOf(m.GetLastDelivered()), FailingSince: timeOf(m.GetFailingSince()), Error: m.GetError(),
		Filter: EventFilter{Kinds: f.GetKinds(), Job: f.GetJob(), Labels: f.GetLabels(), States: f.GetStates()},
	}
	for _, id := range f.GetSandboxIds() {
		out.Filter.SandboxIDs = append(out.Filter.SandboxIDs, dsec.SandboxID(id))
	}
	return out
}

// CreateWebhook has events that happen from now on posted to an address: in order, each until it
// is taken, signed as Standard Webhooks have it. An empty secret has one made; it is shown
// only here.
func (c *Client) CreateWebhook(ctx context.Context, url string, f EventFilter, secret string) (Webhook, string, error) {
	res, err := call(ctx, c, c.webhook.CreateWebhook, &dsecv1.CreateWebhookRequest{Url: url, Filter: f.message(), Secret: secret}, dsec.Retryable)
	if err != nil {
		return Webhook{}, "", err
	}
	return webhookOf(res.Webhook), res.Secret, nil
}

// Webhook tells of one.
func (c *Client) Webhook(ctx context.Context, id string) (Webhook, error) {
	res, err := call(ctx, c, c.webhook.GetWebhook, &dsecv1.GetWebhookRequest{Id: id}, dsec.Retryable)
	return webhookOf(res.GetWebhook()), err
}

// Webhooks tells of all of the project, oldest first.
func (c *Client) Webhooks(ctx context.Context) ([]Webhook, error) {
	res, err := call(ctx, c, c.webhook.ListWebhooks, new(dsecv1.ListWebhooksRequest), dsec.Retryable)
	out := []Webhook{}
	for _, m := range res.GetWebhooks() {
		out = append(out, webhookOf(m))
	}
	return out, err
}

// DeleteWebhook ends one. One that is not there is a success.
func (c *Client) DeleteWebhook(ctx context.Context, id string) error {
	_, err := call(ctx, c, c.webhook.DeleteWebhook, &dsecv1.DeleteWebhookRequest{Id: id}, dsec.Retryable)
	return err
}

// WebhookTolerance is how far the clocks of a server and of a receiver may be apart.
const WebhookTolerance = 5 * time.Minute

// Bytes of a secret, as Standard Webhooks have it.
const minSecret, maxSecret = 24, 64

// VerifyWebhook checks that a delivery was signed with the secret, and lately. Its error has code
// denied, or invalid where the secret is none. The header Webhook-Id is the same each time that an event is delivered.
func VerifyWebhook(secret string, header http.Header, body []byte) error {
	denied := func(why string, a ...any) error { return dsec.Errorf(dsec.CodeDenied, "the webhook's "+why, a...) }
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil || len(key) < minSecret || len(key) > maxSecret {
		// With an empty one anybody could sign.
		return dsec.Invalid("secret", "want whsec_ and base64 of %d to %d bytes", minSecret, maxSecret)
	}
	id, stamp := header.Get("Webhook-Id"), header.Get("Webhook-Timestamp")
	seconds, err := strconv.ParseInt(stamp, 10, 64)
	if id == "" || err != nil {
		return denied("headers Webhook-Id and Webhook-Timestamp are missing")
	}
	if d := time.Since(time.Unix(seconds, 0)); d > WebhookTolerance || d < -WebhookTolerance {
		return denied("time is %s off", d.Round(time.Second))
	}
	mac := hmac.New(sha256.New, key)
	_, _ = fmt.Fprintf(mac, "%s.%s.", id, stamp)
	mac.Write(body)
	want := []byte("v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	for have := range strings.FieldsSeq(header.Get("Webhook-Signature")) {
		if hmac.Equal([]byte(have), want) {
			return nil
		}
	}
	return denied("signature is another")
}
