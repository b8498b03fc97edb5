// Package s3blob keeps blobs as objects of a bucket: of any storage that speaks
// the S3 protocol.
//
// What it relies on is what each such storage gives: an object is there whole or
// not at all, and is seen by all as soon as its put was answered. Where the storage
// also knows If-None-Match, it is what keeps a put from replacing a blob; without
// it two puts of one key at once both write, the same bytes.
//
// A network and a server are not trusted to be in order: an answer that is short,
// long, of another place in the object, or not of an object storage at all is an
// error, never bytes.
package s3blob

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// Driver opens s3://bucket/prefix, with the parameters endpoint (http://host:port
// or https://host:port; without it AWS's own), region, path_style (true or false)
// and ca_file (PEM, in place of the host's own authorities).
var Driver = blob.Driver{
	Scheme: "s3",
	Params: []string{"endpoint", "region", "path_style", "ca_file"},
	Open: func(ctx context.Context, u *url.URL, c blob.Credentials) (blob.Store, error) {
		cfg, err := parse(u)
		if err != nil {
			return nil, err
		}
		cfg.Credentials = c
		return Open(ctx, cfg)
	},
}

// Config says which bucket.
type Config struct {
	Bucket      string
	Prefix      string // of all keys, without a slash at the end; may be empty
	Endpoint    string // empty is AWS's
	Region      string
	PathStyle   bool // the bucket in the path, not in the host's name
	CAFile      string
	Credentials blob.Credentials

	PartSize int64         // of a multipart upload; 0 is 16 MiB. Smaller blobs are one request
	PageSize int32         // keys of a list's request; 0 is what the server gives
	Stall    time.Duration // a request that moves nothing for so long has failed; 0 is 30 s
	Backoff  blob.Backoff  // of the requests of a put; the zero value is blob.DefaultBackoff

	dial func(ctx context.Context, network, addr string) (net.Conn, error) // nil is a net.Dialer's
}

const storeField = "store"

// See https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html.
var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)

func parse(u *url.URL) (Config, error) {
	q := u.Query()
	cfg := Config{
		Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Endpoint: q.Get("endpoint"),
		Region: q.Get("region"), CAFile: q.Get("ca_file"),
	}
	if u.Opaque != "" || !bucketName.MatchString(cfg.Bucket) {
		return Config{}, dsec.Invalid(storeField, "want s3://bucket/prefix, the bucket of 3 to 63 lower-case letters, digits, . and -, which begins and ends with a letter or a digit; got %.80q", cfg.Bucket)
	}
	if strings.HasSuffix(cfg.Bucket, "--x-s3") {
		return Config{}, dsec.Invalid(storeField, "a directory bucket lists keys in no order: want a general purpose bucket")
	}
	if cfg.Prefix != "" && blob.CheckKey(cfg.Prefix) != nil {
		return Config{}, dsec.Invalid(storeField, "want a prefix of letters, digits, '_', '-' and '.' between single slashes")
	}
	if style := q.Get("path_style"); style != "" {
		on, err := strconv.ParseBool(style)
		if err != nil {
			return Config{}, dsec.Invalid(storeField, "path_style: want true or false")
		}
		cfg.PathStyle = on
	}
	if cfg.Endpoint != "" {
		e, err := url.Parse(cfg.Endpoint)
		if err != nil || e.Scheme != "http" && e.Scheme != "https" || e.Host == "" || e.User != nil || e.RawQuery != "" || e.Fragment != "" || strings.Trim(e.Path, "/") != "" {
			return Config{}, dsec.Invalid(storeField, "endpoint: want http://host:port or https://host:port")
		}
	}
	cfg.Endpoint = strings.TrimRight(cfg.Endpoint, "/")
	return cfg, nil
}

// Store is a blob.Store and blob.Sweeper.
type Store struct {
	cfg           Config
	client        *s3.Client
	getter        *getter
	http          *http.Transport
	unconditional atomic.Bool    // the server does not know If-None-Match
	aborts        sync.WaitGroup // of uploads whose put failed
}

var (
	_ blob.Store   = (*Store)(nil)
	_ blob.Sweeper = (*Store)(nil)
)

const defaultPart = 16 << 20

// Open makes a client and asks the server for the bucket.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.PartSize == 0 {
		cfg.PartSize = defaultPart
	}
	if cfg.Stall == 0 {
		cfg.Stall = 30 * time.Second
	}
	if cfg.Backoff == (blob.Backoff{}) {
		cfg.Backoff = blob.DefaultBackoff
	}
	if cfg.Region == "" {
		cfg.Region = "us-east-1" // which others than AWS take for any
	}
	if _, err := cfg.Credentials.Keys(); err != nil {
		return nil, err
	}
	roots, err := authorities(cfg.CAFile)
	if err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, http: newTransport(roots)}
	if cfg.dial != nil {
		s.http.DialContext = cfg.dial
	}
	opt := s3.Options{
		Region: cfg.Region, UsePathStyle: cfg.PathStyle,
		Credentials:                  aws.NewCredentialsCache(provider{cfg.Credentials}),
		HTTPClient:                   &client{base: s.http, stall: cfg.Stall},
		Retryer:                      aws.NopRetryer{}, // blob.Backoff repeats
		RequestChecksumCalculation:   aws.RequestChecksumCalculationWhenRequired,
		ResponseChecksumValidation:   aws.ResponseChecksumValidationWhenRequired,
		ContinueHeaderThresholdBytes: -1,
		DisableS3ExpressSessionAuth:  aws.Bool(true),
	}
	if cfg.Endpoint != "" {
		opt.BaseEndpoint = aws.String(cfg.Endpoint)
	}
	if s.getter, err = newGetter(ctx, opt, cfg.Bucket); err != nil {
		return nil, err
	}
	s.client = s3.New(opt)
	err = cfg.Backoff.Do(ctx, func() error {
		// A list, for what is wrong with a head is not told.
		_, err := s.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &cfg.Bucket, Prefix: s.object(""), MaxKeys: aws.Int32(1)})
		return s.bucketError(ctx, err)
	})
	if err != nil {
		s.http.CloseIdleConnections()
		return nil, err
	}
	return s, nil
}

// Close implements io.Closer. It waits for what frees failed uploads.
func (s *Store) Close() error {
	s.aborts.Wait()
	s.http.CloseIdleConnections()
	return nil
}

// newTransport makes connections that do not outlive their use by much, through no
// proxy but what the host's network has.
func newTransport(roots *x509.CertPool) *http.Transport {
	return &http.Transport{
		DialContext:            (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSHandshakeTimeout:    10 * time.Second,
		TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		MaxIdleConns:           256,
		MaxIdleConnsPerHost:    256,
		IdleConnTimeout:        60 * time.Second,
		DisableCompression:     true, // bytes are counted as they come
		MaxResponseHeaderBytes: 64 << 10,
		ReadBufferSize:         64 << 10,
		WriteBufferSize:        64 << 10,
	}
}

// authorities is nil, which is the host's own, where there is no file.
func authorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, &dsec.Error{Code: dsec.CodeInvalid, Field: storeField, Message: "ca_file cannot be read: want a file of certificates in PEM", Err: err}
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, dsec.Invalid(storeField, "ca_file holds no certificate in PEM")
	}
	return pool, nil
}

// provider reads the keys anew each minute: whoever rotates them writes the file.
type provider struct{ from blob.Credentials }

// Retrieve implements aws.CredentialsProvider.
func (p provider) Retrieve(context.Context) (aws.Credentials, error) {
	k, err := p.from.Keys()
	if err != nil {
		return aws.Credentials{}, err
	}
	return aws.Credentials{
		AccessKeyID: k.ID, SecretAccessKey: k.Secret, SessionToken: k.Token, CanExpire: true, Expires: time.Now().Add(time.Minute),
	}, nil
}

// object is the name of a blob in the bucket.
func (s *Store) object(key string) *string {
	if s.cfg.Prefix != "" {
		key = s.cfg.Prefix + "/" + key
	}
	return &key
}
