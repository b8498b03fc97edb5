package registry

import (
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/opendsec/dsec"
)

func TestPull(t *testing.T) {
	s := newServer(t, false)
	img := image(t, []byte("one"), []byte("two"), []byte("one"), nil)
	s.push("team/app:v1", img)
	c := s.client()
	for _, ref := range []string{"/team/app:v1", "/team/app@" + digest(t, img), "/team/app:other@" + digest(t, img)} {
		wantImage(t, c, Request{Ref: s.host + ref}, img)
	}
	got, err := c.Resolve(t.Context(), Request{Ref: s.host + "/team/app:v1"})
	check(t, err)
	if got.Digest != digest(t, img) || got.Ref.String() != s.host+"/team/app:v1" {
		t.Errorf("resolved %s to %s", got.Ref, got.Digest)
	}
	_, err = c.Resolve(t.Context(), Request{Ref: s.host + "/team/app:v2"})
	wantError(t, err, dsec.CodeNotFound, "ref")
	_, err = c.Resolve(t.Context(), Request{Ref: s.host + "/team/none"})
	wantError(t, err, dsec.CodeNotFound, "ref")
}

func TestPlatforms(t *testing.T) {
	s := newServer(t, false)
	add := func(index v1.ImageIndex, p *v1.Platform, img v1.Image) v1.ImageIndex {
		return mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: p}})
	}
	plain, v3, arm := image(t, []byte("plain")), image(t, []byte("v3")), image(t, []byte("arm"))
	index := add(empty.Index, &v1.Platform{OS: "linux", Architecture: "amd64", Variant: "v3"}, v3)
	index = add(index, &v1.Platform{OS: "linux", Architecture: "amd64"}, plain)
	index = add(index, &v1.Platform{OS: "unknown", Architecture: "unknown"}, image(t, []byte("attestation")))
	index = add(index, &v1.Platform{OS: "linux", Architecture: "arm64"}, arm)
	s.push("list", index)
	c := s.client()
	wantImage(t, c, Request{Ref: s.host + "/list"}, plain)
	wantImage(t, c, Request{Ref: s.host + "/list@" + digest(t, index)}, plain)
	wantImage(t, c, Request{Ref: s.host + "/list", Platform: "linux/amd64/v3"}, v3)
	_, err := c.Resolve(t.Context(), Request{Ref: s.host + "/list", Platform: "linux/arm64"})
	wantError(t, err, dsec.CodeUnsupported, "platform")
	_, err = c.Resolve(t.Context(), Request{Ref: s.host + "/list", Platform: "linux/amd64/v4"})
	wantError(t, err, dsec.CodeUnsupported, "ref")
	_, err = c.Resolve(t.Context(), Request{Ref: s.host + "/list", Platform: "linux"})
	wantError(t, err, dsec.CodeInvalid, "platform")
	s.push("arm", add(empty.Index, &v1.Platform{OS: "linux", Architecture: "arm64"}, arm))
	_, err = c.Resolve(t.Context(), Request{Ref: s.host + "/arm"})
	wantError(t, err, dsec.CodeUnsupported, "ref")
}
