package registry

import (
	"errors"
	"net"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/opendsec/dsec"
)

// dockerHub is what docker.io is reached by.
const dockerHub = "index.docker.io"

// Reference is a parsed reference, complete.
type Reference struct {
	Host       string // with its port, if it has one; docker.io for Docker's
	Repository string
	Tag        string // empty where Digest is all that was said
	Digest     string // sha256:<hex>, or empty
}

// String is the reference in full.
func (r Reference) String() string {
	s := r.Host + "/" + r.Repository
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if r.Digest != "" {
		s += "@" + r.Digest
	}
	return s
}

// The grammar of references. A path of `..` would be another repository to a
// server that cleans it.
var (
	repositoryForm = regexp.MustCompile(`^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$`)
	tagForm        = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	digestForm     = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	hostnameForm   = regexp.MustCompile(`^[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*$`)
)

const maxRef = 1024

// ParseReference completes a reference: the host of one without is defaultHost.
// Errors are of the field ref.
func ParseReference(s, defaultHost string) (Reference, error) {
	bad := func(want string) (Reference, error) {
		return Reference{}, dsec.Invalid("ref", "%.300q: want [host[:port]/]repository[:tag][@sha256:...]: %s", s, want)
	}
	if len(s) > maxRef {
		return bad("at most " + strconv.Itoa(maxRef) + " characters")
	}
	var r Reference
	rest, digest, pinned := strings.Cut(s, "@")
	if pinned {
		if !digestForm.MatchString(digest) {
			return bad("a digest of sha256: and 64 hex digits")
		}
		r.Digest = digest
	}
	rest, tag, tagged := cutTag(rest)
	if tagged {
		if !tagForm.MatchString(tag) {
			return bad("a tag of letters, digits and . _ -")
		}
		r.Tag = tag
	} else if !pinned {
		r.Tag = "latest"
	}
	r.Host, r.Repository = defaultHost, rest
	if first, path, ok := strings.Cut(rest, "/"); ok && IsHost(first) {
		r.Host, r.Repository = first, path
	}
	host, err := parseHost(r.Host)
	if err != nil {
		return bad(err.Error())
	}
	r.Host = canonicalHost(host)
	if r.Host == "docker.io" && !strings.Contains(r.Repository, "/") {
		r.Repository = "library/" + r.Repository
	}
	if len(r.Repository) > 255 || !repositoryForm.MatchString(r.Repository) {
		return bad("a repository of lower-case letters, digits and . _ - /, of at most 255 characters")
	}
	return r, nil
}

// cutTag splits the tag off; the colon of a port is no tag's.
func cutTag(s string) (rest, tag string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.Contains(s[i:], "/") {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// IsHost reports whether the first part of a reference is a host, by the rule
// that all tools have: it has a dot or a port, or is localhost.
func IsHost(first string) bool {
	return strings.ContainsAny(first, ".:") || first == "localhost"
}

// parseHost checks host or host:port.
func parseHost(s string) (string, error) {
	bad := errors.New("want host or host:port")
	host, port := s, ""
	if strings.Contains(s, "]:") || strings.Count(s, ":") == 1 {
		var err error
		if host, port, err = net.SplitHostPort(s); err != nil {
			return "", bad
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", bad
		}
	} else if in, ok := strings.CutPrefix(s, "["); ok {
		if host, ok = strings.CutSuffix(in, "]"); !ok {
			return "", bad
		}
	}
	if strings.Contains(host, ":") {
		if ip := net.ParseIP(host); ip == nil || !strings.HasPrefix(s, "[") {
			return "", bad
		}
	} else if len(host) > 253 || !hostnameForm.MatchString(host) {
		return "", bad
	}
	return s, nil
}

// canonicalHost is one name for each host.
func canonicalHost(host string) string {
	host = strings.ToLower(host)
	if host == dockerHub || host == "registry-1.docker.io" {
		return "docker.io"
	}
	return host
}

// mirror is where a registry's images may be had from as well; with an empty
// prefix, it may be the registry itself.
type mirror struct {
	host   string
	prefix string
	plain  bool
}

// registry is the mirror's host as the library wants it.
func (m mirror) registry() (name.Registry, error) {
	host := m.host
	if host == "docker.io" {
		host = dockerHub
	}
	var opts []name.Option
	if m.plain {
		opts = append(opts, name.Insecure)
	}
	return name.NewRegistry(host, opts...)
}

// repository is the name that a repository has there.
func (m mirror) repository(repo string) string {
	if m.prefix == "" {
		return repo
	}
	return m.prefix + "/" + repo
}

// addMirrors reads the mirrors of one registry. The operator named them: they may
// be private, and plain where they say http.
func (p *policy) addMirrors(host string, urls []string) (list []mirror, err error) {
	field := "registry.mirrors." + host
	if _, err := parseHost(host); err != nil {
		return nil, dsec.Invalid(field, "%v", err)
	}
	for _, s := range urls {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return nil, dsec.Invalid(field, "%q: want https://host[:port][/prefix]", s)
		}
		h, err := parseHost(u.Host)
		if err != nil {
			return nil, dsec.Invalid(field, "%q: %v", s, err)
		}
		m := mirror{host: canonicalHost(h), prefix: strings.Trim(u.Path, "/"), plain: u.Scheme == "http"}
		if m.prefix != "" && !repositoryForm.MatchString(m.prefix) {
			return nil, dsec.Invalid(field, "%q: want a prefix of lower-case letters, digits and . _ - /", s)
		}
		p.private[m.host] = true
		if m.plain {
			p.insecure[m.host] = true
		}
		list = append(list, m)
	}
	return list, nil
}
