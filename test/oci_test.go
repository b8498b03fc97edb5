package test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// ociLayout is an OCI layout of one layer with a configuration.
func ociLayout(t testing.TB, layer []byte, config string) []byte {
	t.Helper()
	return ociLayoutOf(t, config, layer)
}

// ociLayoutOf is one of several layers, lowest first.
func ociLayoutOf(t testing.TB, config string, layers ...[]byte) []byte {
	t.Helper()
	digest := func(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
	var diffs, descs []string
	for _, l := range layers {
		diffs = append(diffs, strconv.Quote(digest(l)))
		descs = append(descs, fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":%q,"size":%d}`, digest(l), len(l)))
	}
	doc := fmt.Appendf(nil, `{"architecture":%q,"os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":[%s]}}`, runtime.GOARCH, config, strings.Join(diffs, ","))
	manifest := fmt.Appendf(nil, `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",`+
		`"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":%q,"size":%d},"layers":[%s]}`, digest(doc), len(doc), strings.Join(descs, ","))
	index := fmt.Appendf(nil, `{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":%q,"size":%d}]}`, digest(manifest), len(manifest))
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(name string, data []byte) {
		check(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}))
		_, err := w.Write(data)
		check(t, err)
	}
	add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	for _, blob := range append(layers, doc, manifest) {
		add("blobs/sha256/"+digest(blob)[len("sha256:"):], blob)
	}
	add("index.json", index)
	check(t, w.Close())
	return b.Bytes()
}
