package s3blob

import (
	"context"
	"encoding/xml"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/opendsec/dsec"
)

// getter does the one request that there are many of, without the layers that the
// SDK puts around each: they cost four times what the rest of it does.
type getter struct {
	client      *client
	signer      *v4.Signer
	credentials aws.CredentialsProvider
	region      string
	bucket      url.URL // where its objects are below
}

func newGetter(ctx context.Context, opt s3.Options, bucket string) (*getter, error) {
	e, err := s3.NewDefaultEndpointResolverV2().ResolveEndpoint(ctx, s3.EndpointParameters{
		Bucket: &bucket, Region: &opt.Region, Endpoint: opt.BaseEndpoint, ForcePathStyle: &opt.UsePathStyle,
	})
	if err != nil {
		return nil, &dsec.Error{Code: dsec.CodeInvalid, Field: storeField, Message: "has no address for its region", Err: err}
	}
	return &getter{
		client: opt.HTTPClient.(*client), credentials: opt.Credentials, region: opt.Region, bucket: e.URI,
		signer: v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true }),
	}, nil
}

// emptyHash is the SHA-256 of nothing.
const emptyHash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// get asks for n bytes of an object from off. The answer is of a range, or of all.
func (g *getter) get(ctx context.Context, object string, off, n int64) (*http.Response, error) {
	u := g.bucket
	u.Path += "/" + object // of characters that need no escape
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	req.Header.Set("X-Amz-Content-Sha256", emptyHash)
	keys, err := g.credentials.Retrieve(ctx)
	if err != nil {
		return nil, err
	}
	if err := g.signer.SignHTTP(ctx, keys, req, emptyHash, "s3", g.region, time.Now()); err != nil {
		return nil, err
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusPartialContent && resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

// answerError is an answer that is no object. Its text is for the log.
type answerError struct {
	status int
	code   string // the protocol's; empty where it is not an object storage's
}

// Error implements error.
func (e *answerError) Error() string { return fmt.Sprintf("status %d, code %q", e.status, e.code) }

// readError reads what the answer says, as far as it can be understood.
func readError(resp *http.Response) error {
	e := &answerError{status: resp.StatusCode}
	var body struct{ Code string } // which a page, not being XML or not of this kind, has not
	if xml.NewDecoder(resp.Body).Decode(&body) == nil && apiCode.MatchString(body.Code) {
		e.code = body.Code
	}
	return e
}
