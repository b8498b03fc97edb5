package registry

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
)

// authenticator picks the credentials for one host: the caller's own for the host
// that the caller named, else the operator's.
func (c *Client) authenticator(m mirror, host, repo string, own *Credentials) (authn.Authenticator, error) {
	if own != nil && m.host == host {
		return authn.FromConfig(authn.AuthConfig{Username: own.Username, Password: own.Password, IdentityToken: own.Token}), nil
	}
	if c.cfg.CredentialsFile == "" {
		return authn.Anonymous, nil
	}
	doc, err := os.ReadFile(c.cfg.CredentialsFile)
	if err != nil {
		return nil, fmt.Errorf("read registry credentials: %w", err)
	}
	a, err := FindCredentials(doc, m.host, repo)
	if err != nil || a == nil {
		return authn.Anonymous, err
	}
	return authn.FromConfig(*a), nil
}

// FindCredentials looks in a docker config.json for a host, or for a repository
// or a part of its path there; nil if there are none.
func FindCredentials(doc []byte, host, repo string) (*authn.AuthConfig, error) {
	var file struct {
		Auths map[string]authn.AuthConfig `json:"auths"`
	}
	if err := json.Unmarshal(doc, &file); err != nil {
		// The error would quote what is in the file.
		return nil, fmt.Errorf("registry credentials: not a docker config.json")
	}
	var best *authn.AuthConfig
	longest := -1
	for key, a := range file.Auths {
		key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
		h, path, _ := strings.Cut(strings.TrimSuffix(key, "/"), "/")
		if path == "v1" || path == "v2" {
			path = "" // as docker writes its own host
		}
		if canonicalHost(h) != host || path != "" && repo != path && !strings.HasPrefix(repo, path+"/") {
			continue
		}
		if len(path) > longest {
			longest, best = len(path), &a
		}
	}
	return best, nil
}
