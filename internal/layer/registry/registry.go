// Package registry fetches images from OCI registries for the layer store.
//
// The words: a reference is what a caller writes, a host, a repository and a tag
// or a digest. Resolve asks the host, or its mirrors, which manifest that is for
// one platform. An Image is that manifest; Open gives the image as the tar stream
// of an OCI layout, with its blobs as they come, for the store to build a layer of.
//
//	c, err := registry.New(registry.Config{...})
//	img, err := c.Resolve(ctx, registry.Request{Ref: "python:3.12", Scope: project})
//	layout := img.Open(ctx)
//	defer layout.Close()
//	meta, findings, err := store.Build(ctx, layer.BuildOptions{}, layout)
//
// Of what a registry sends only manifests are read here, each of at most 4 MiB;
// configuration and layers go by, counted and hashed, to the import helper.
//
// The caller names the host, and who answers there names others: no connection is
// made to an address that is not public unless the operator named the host, and
// none without TLS unless the operator said so. That holds for redirects, token
// servers and every address that a name resolves to, because it is looked at when
// the connection is made.
package registry

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// Config says which registries there are and how they are reached. Zero values
// take the default named.
type Config struct {
	// Default is the registry of references that name none: docker.io.
	Default string
	// Mirrors of a registry, by its host: URLs (https://host[:port][/prefix]) that
	// are tried in order before it. The prefix goes in front of the repository.
	Mirrors map[string][]string
	// Insecure hosts (host or host:port) are spoken to without TLS where they do
	// not offer it.
	Insecure []string
	// Private hosts (host, for any port, or host:port) may have addresses that are
	// not public. Mirrors and Insecure hosts may anyway.
	Private []string
	// CAFile has certificates in PEM of authorities to trust beside the system's.
	CAFile string
	// CredentialsFile is a docker config.json whose `auths` are used where a request
	// has no credentials of its own. It is read at each request.
	CredentialsFile string
	// MaxBytes of one image, as it is sent: 32 GiB.
	MaxBytes int64
	// CacheDir is where blobs that came whole are kept for an import that is
	// repeated. Empty: nowhere.
	CacheDir string
	// CacheBytes bounds CacheDir: 4 GiB.
	CacheBytes int64
	// Logger: slog.Default().
	Logger *slog.Logger

	times times
}

// times are the waits, of which tests have shorter ones.
type times struct {
	backoff time.Duration // before the first repetition; doubles
	longest time.Duration // between two
	stall   time.Duration // without a byte
}

// How often a request is made, and how often in a row a body may break off
// without a byte more.
const attempts = 5

// Bounds of what a registry says.
const (
	maxManifest = 4 << 20
	maxLayers   = 512
	maxHeader   = 256 << 10
)

// Client fetches images. Its methods may be called from any goroutine.
type Client struct {
	cfg     Config
	policy  policy
	mirrors map[string][]mirror
	http    http.RoundTripper
	cache   *cache // nil: none
	log     *slog.Logger
}

// Credentials are a caller's own, for the host of the reference and no other.
type Credentials struct {
	Username string
	Password string
	// Token is an identity token, in place of a password.
	Token string
}

// LogValue keeps them out of logs.
func (Credentials) LogValue() slog.Value { return slog.StringValue("credentials") }

// String keeps them out of texts.
func (Credentials) String() string { return "credentials" }

// GoString keeps them out of %#v.
func (Credentials) GoString() string { return "credentials" }

// Request names an image.
type Request struct {
	// Ref is a reference: [host[:port]/]repository[:tag][@digest].
	Ref string
	// Platform is os/architecture[/variant]; empty is this host's.
	Platform string
	// Credentials, where set, are used in place of the configured ones.
	Credentials *Credentials
	// Scope is whose blobs may be used again: what one project's credentials opened
	// is not another's.
	Scope string
}

// New checks the configuration, and opens the cache.
func New(cfg Config) (*Client, error) {
	cfg.Default = cmp.Or(cfg.Default, "docker.io")
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, 32<<30)
	cfg.CacheBytes = cmp.Or(cfg.CacheBytes, 4<<30)
	cfg.times.backoff = cmp.Or(cfg.times.backoff, 250*time.Millisecond)
	cfg.times.longest = cmp.Or(cfg.times.longest, 10*time.Second)
	cfg.times.stall = cmp.Or(cfg.times.stall, time.Minute)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	c := &Client{cfg: cfg, mirrors: map[string][]mirror{}, log: cfg.Logger.With("component", "registry")}
	if _, err := parseHost(cfg.Default); err != nil {
		return nil, dsec.Invalid("registry.default", "%v", err)
	}
	var err error
	if c.policy.insecure, err = hostSet("registry.insecure", cfg.Insecure); err != nil {
		return nil, err
	}
	if c.policy.private, err = hostSet("registry.private_hosts", cfg.Private); err != nil {
		return nil, err
	}
	for host, urls := range cfg.Mirrors {
		list, err := c.policy.addMirrors(host, urls)
		if err != nil {
			return nil, err
		}
		c.mirrors[canonicalHost(host)] = list
	}
	roots, err := rootCAs(cfg.CAFile)
	if err != nil {
		return nil, err
	}
	c.http = guard{&c.policy, &http.Transport{
		DialContext: c.policy.dial, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: true, DisableCompression: true,
		TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: 30 * time.Second,
		IdleConnTimeout: 30 * time.Second, MaxIdleConnsPerHost: 4, MaxResponseHeaderBytes: maxHeader,
	}}
	if cfg.CacheDir != "" {
		if c.cache, err = openCache(cfg.CacheDir, cfg.CacheBytes); err != nil {
			return nil, fmt.Errorf("open registry cache: %w", err)
		}
	}
	return c, nil
}

// rootCAs are the system's and those of file.
func rootCAs(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, dsec.Invalid("registry.ca_file", "%v", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, dsec.Invalid("registry.ca_file", "want certificates in PEM")
	}
	return pool, nil
}

func hostSet(field string, hosts []string) (map[string]bool, error) {
	set := map[string]bool{}
	for _, h := range hosts {
		host, err := parseHost(h)
		if err != nil {
			return nil, dsec.Invalid(field, "%q: %v", h, err)
		}
		set[strings.ToLower(host)] = true
	}
	return set, nil
}
