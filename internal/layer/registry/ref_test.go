package registry

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

var someDigest = "sha256:" + strings.Repeat("0a", 32)

func TestReferences(t *testing.T) {
	for ref, want := range map[string]string{
		"python":                                   "docker.io/library/python:latest",
		"python:3.12":                              "docker.io/library/python:3.12",
		"team/app":                                 "docker.io/team/app:latest",
		"docker.io/python":                         "docker.io/library/python:latest",
		"index.docker.io/team/app:x":               "docker.io/team/app:x",
		"ghcr.io/a/b/c:V1.2-x_y":                   "ghcr.io/a/b/c:V1.2-x_y",
		"localhost/app":                            "localhost/app:latest",
		"localhost:5000/app:1":                     "localhost:5000/app:1",
		"Registry.EXAMPLE:443/a/b":                 "registry.example:443/a/b:latest",
		"[::1]:5000/a":                             "[::1]:5000/a:latest",
		"10.1.2.3/a__b/c-d.e":                      "10.1.2.3/a__b/c-d.e:latest",
		"host.example/a@" + someDigest:             "host.example/a@" + someDigest,
		"host.example/a:tag@" + someDigest:         "host.example/a:tag@" + someDigest,
		"a@" + someDigest:                          "docker.io/library/a@" + someDigest,
		"host.example/" + strings.Repeat("a", 255): "host.example/" + strings.Repeat("a", 255) + ":latest",
	} {
		got, err := ParseReference(ref, "docker.io")
		if err != nil || got.String() != want {
			t.Errorf("%s: %s, %v, want %s", ref, got, err, want)
		}
		if again, err := ParseReference(want, "other.example"); err != nil || again != got {
			t.Errorf("%s: read again %+v, %v", want, again, err)
		}
	}
	if got, err := ParseReference("python:3.12", "mirror.example:5000"); err != nil || got.String() != "mirror.example:5000/python:3.12" {
		t.Errorf("with another default: %s, %v", got, err)
	}
	for _, bad := range []string{
		"", ":", "@", "/", "a/", "/a", "A", "a//b", "a/../b", "../a", "host.example/../v2/x", "a:", "a:b:c", "a:" + strings.Repeat("x", 129), "a:.x", "a:-x",
		"a@sha256:abc", "a@" + strings.ToUpper(someDigest), "a@sha512:" + strings.Repeat("a", 128), "a@" + someDigest + "@" + someDigest, "a b", "a\n", "a%2f", "a?x",
		"http://host/a", "user@host.example/a", "host.example:99999/a", "host.example:0/a", "host.example:x/a", "-host.example/a", "::1/a", "[::1/a", "[zz::]:1/a",
		"host..example/a", "hóst.example/a", "a._b", "a_-b", "_a", "host.example/" + strings.Repeat("a", 256), strings.Repeat("a/", 600) + "a", "a\x00b",
	} {
		got, err := ParseReference(bad, "docker.io")
		if err == nil {
			t.Errorf("%q is %s", bad, got)
		} else {
			wantError(t, err, dsec.CodeInvalid, "ref")
		}
	}
}

func FuzzParseReference(f *testing.F) {
	for _, s := range []string{"python:3.12", "[::1]:5000/a", "host.example/a:tag@" + someDigest, "a/../b", "a@b@c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseReference(s, "docker.io")
		if err != nil {
			return
		}
		if again, err := ParseReference(r.String(), "other.example"); err != nil || again != r {
			t.Errorf("%q is %s, which is %+v, %v", s, r, again, err)
		}
		for part := range strings.SplitSeq(r.Repository, "/") {
			if part == "" || part == "." || part == ".." {
				t.Errorf("%q has repository %q", s, r.Repository)
			}
		}
	})
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"`+someDigest+`","size":2},"layers":[]}`), "application/vnd.oci.image.manifest.v1+json")
	f.Add([]byte(`{"manifests":[]}`), "application/vnd.oci.image.index.v1+json")
	c, err := New(Config{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, doc []byte, kind string) {
		k, err := kindOf(doc, "")
		if err != nil || !k.IsImage() {
			return
		}
		img := &Image{c: c}
		if err := img.read(doc); err != nil {
			return
		}
		if img.Size < 0 || img.Size > c.cfg.MaxBytes || len(img.blobs) > maxLayers+1 {
			t.Errorf("%d bytes in %d blobs", img.Size, len(img.blobs))
		}
		for _, d := range img.blobs {
			if !digestForm.MatchString(d.Digest.String()) {
				t.Errorf("digest %q", d.Digest)
			}
		}
	})
}

func FuzzCredentials(f *testing.F) {
	f.Add([]byte(`{"auths":{"host.example":{"auth":"dTpw"}}}`), "host.example")
	f.Fuzz(func(t *testing.T, doc []byte, host string) {
		_, err := FindCredentials(doc, host, "a/b")
		if err != nil && strings.Contains(err.Error(), string(doc)) && len(doc) > 8 {
			t.Errorf("the error tells what is in the file: %v", err)
		}
	})
}
