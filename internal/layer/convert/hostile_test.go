package convert

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// What is not a tar is refused by what it is, and never handed on. (S97)
func TestNotAnArchive(t *testing.T) {
	at := func(off int, magic string) []byte {
		b := make([]byte, 128<<10)
		copy(b[off:], magic)
		return b
	}
	erofs := mustConvert(t, tarOf(t, file("a"))).image
	for name, tc := range map[string]struct {
		data    []byte
		message string
	}{
		"empty":      {nil, "empty"},
		"short":      {[]byte("hello"), "not a tar archive"},
		"text":       {bytes.Repeat([]byte("hello\n"), 1000), "not a tar archive"},
		"erofs":      {erofs, "an EROFS image"},
		"ext4":       {at(1080, "\x53\xef"), "ext4 image"},
		"qcow2":      {at(0, "QFI\xfb\x00\x00\x00\x03"), "a QCOW2 image"},
		"squashfs":   {at(0, "hsqs"), "a squashfs image"},
		"iso":        {at(32769, "CD001"), "an ISO 9660 image"},
		"btrfs":      {at(65600, "_BHRfS_M"), "a btrfs image"},
		"disk":       {at(510, "\x55\xaa"), "a partitioned disk image"},
		"zip":        {at(0, "PK\x03\x04"), "a zip archive"},
		"xz":         {at(0, "\xfd7zXZ\x00"), "an xz stream"},
		"gzip of it": {testutil.Gzip(t, erofs), "an EROFS image"},
		"gzip twice": {testutil.Gzip(t, testutil.Gzip(t, tarOf(t, file("a")))), "a gzip stream in a compressed stream"},
		"bad gzip":   {append([]byte("\x1f\x8b\x08"), make([]byte, 100)...), "damaged compressed stream"},
		"bad zstd":   {append([]byte("\x28\xb5\x2f\xfd"), bytes.Repeat([]byte{0xff}, 100)...), "damaged compressed stream"},
	} {
		t.Run(name, func(t *testing.T) { wantInvalid(t, tc.data, Options{}, tc.message) })
	}
	// A tar that holds the magic of something else is a tar.
	mustConvert(t, tarOf(t, text("a", strings.Repeat("\x53\xef", 600))))
	mustConvert(t, make([]byte, 10240)) // no entries at all
}

// An archive that was cut off anywhere is refused. (S95)
func TestTruncated(t *testing.T) {
	whole := tarOf(t, dir("d/"), file("d/a"), text("zeros", strings.Repeat("\x00", 1024)), symlink("l", "x"))
	end := len(whole) - 1024 // the end mark
	for cut := 1; cut <= end; cut++ {
		if r := cut % 512; r > 1 && r != 256 && r != 511 {
			continue // each side of each block, and inside
		}
		if _, err := convertBytes(t, whole[:cut], Options{}); err == nil {
			t.Fatalf("cut at %d of %d: accepted", cut, len(whole))
		}
	}
	for name, packed := range map[string][]byte{"gzip": testutil.Gzip(t, whole), "zstd": zstdOf(t, whole)} {
		for cut := 1; cut < len(packed); cut++ {
			if _, err := convertBytes(t, packed[:cut], Options{}); err == nil {
				t.Fatalf("%s cut at %d of %d: accepted", name, cut, len(packed))
			}
		}
	}
	mustConvert(t, whole)
}

// bomb is a compressed stream of n zeros after a header that promises them.
func bomb(t *testing.T, n int64, pack func(io.Writer) io.WriteCloser) []byte {
	var out bytes.Buffer
	w := pack(&out)
	tw := tar.NewWriter(w)
	if err := tw.WriteHeader(&tar.Header{Name: "zeros", Size: n, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<20)
	for left := n; left > 0; left -= int64(len(block)) {
		if _, err := tw.Write(block[:min(left, int64(len(block)))]); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.Close(), w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func packGzip(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) }

// sink is a scratch or image that only counts.
type sink struct{ written int64 }

func (s *sink) WriteAt(p []byte, _ int64) (int, error) {
	s.written += int64(len(p))
	return len(p), nil
}
func (s *sink) ReadAt(p []byte, _ int64) (int, error) { clear(p); return len(p), nil }
func (s *sink) Truncate(int64) error                  { return nil }

// Bombs stop at a cap, and what they may write until then is bounded. (S93)
func TestBombs(t *testing.T) {
	packZstd := func(w io.Writer) io.WriteCloser {
		z, err := zstd.NewWriter(w)
		if err != nil {
			t.Fatal(err)
		}
		return z
	}
	gz := bomb(t, 300<<20, packGzip)
	for name, tc := range map[string]struct {
		data    []byte
		limits  Limits
		message string
		scratch bool // is found only where the scratch keeps what is written
	}{
		"gzip ratio":      {gz, Limits{}, "grows more than 200 times", false},
		"zstd ratio":      {bomb(t, 300<<20, packZstd), Limits{}, "grows more than 200 times", false},
		"gzip size":       {gz, Limits{ContentBytes: 50 << 20}, "more than 52428800 bytes after decompression", false},
		"in an image":     {layout(t, testImage{layers: layers(t, []entry{file("a")}), pack: func(int, []byte) []byte { return gz }}), Limits{}, "grows more than 200 times", true},
		"archive size":    {tarOf(t, text("a", strings.Repeat("x", 5000))), Limits{ArchiveBytes: 4000}, "more bytes than allowed", false},
		"after the end":   {append(tarOf(t, file("a")), make([]byte, 1<<20)...), Limits{ArchiveBytes: 100 << 10}, "more bytes than allowed", false},
		"entries":         {tarOf(t, file("a"), file("b"), file("c")), Limits{Entries: 5}, "more than 5 entries", false},
		"implied entries": {tarOf(t, file("a/b/c/d/e/f/g")), Limits{Entries: 5}, "more than 5 entries", false},
		"depth":           {tarOf(t, file(strings.Repeat("d/", 300)+"x")), Limits{}, "more than 256 deep", false},
		"depth by dir":    {tarOf(t, dir(strings.Repeat("d/", 256))), Limits{}, "more than 256 deep", false},
		"depth by link":   {tarOf(t, symlink("l", strings.Repeat("d/", 300)), file("l/x")), Limits{}, "more than 256 deep", false},
		"names":           {tarOf(t, file(strings.Repeat("n", 200)), file(strings.Repeat("m", 200))), Limits{MetadataBytes: 300}, "take more than 300 bytes", false},
		"paths":           {tarOf(t, file(strings.Repeat("n", 100)+"/a"), file(strings.Repeat("n", 100)+"/b")), Limits{MetadataBytes: 250}, "take more than 250 bytes", false},
		"layers":          {layout(t, testImage{layers: layers(t, []entry{file("a")}, []entry{file("b")}, []entry{file("c")})}), Limits{Layers: 2}, "3 layers, want at most 2", true},
		"document":        {layout(t, testImage{config: object{"Labels": object{"a": strings.Repeat("x", 3000)}}}), Limits{DocumentBytes: 2000}, "want at most 2000", true},
		"zstd window":     {hugeWindow(t), Limits{}, "damaged compressed stream: window size exceeded", false},
	} {
		t.Run(name, func(t *testing.T) {
			var scratch, image sink
			var in io.Reader = bytes.NewReader(tc.data)
			_, err := Convert(in, &image, &scratch, Options{Limits: tc.limits})
			if tc.scratch {
				wantInvalid(t, tc.data, Options{Limits: tc.limits}, tc.message)
				return
			}
			if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid || !strings.Contains(err.Error(), tc.message) {
				t.Fatalf("%v, want invalid with %q", err, tc.message)
			}
			if scratch.written > 300<<20 || image.written > 0 {
				t.Errorf("%d bytes of scratch, %d of image", scratch.written, image.written)
			}
		})
	}
}

// hugeWindow is a zstd frame that asks its reader for a window of 1 GiB.
func hugeWindow(t *testing.T) []byte {
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 20 << 3} // no single segment; 2^(10+20)
	raw := tarOf(t, file("a"))
	head := make([]byte, 4)
	binary.LittleEndian.PutUint32(head, uint32(len(raw))<<3|1) // last block, raw
	return append(append(frame, head[:3]...), raw...)
}

// The same layer listed many times is counted each time.
func TestRepeatedLayer(t *testing.T) {
	l := tarOf(t, text("a", strings.Repeat("x", 100<<10)))
	img := testImage{}
	for range 20 {
		img.layers = append(img.layers, l)
	}
	archive := layout(t, img)
	wantInvalid(t, archive, Options{Limits: Limits{ContentBytes: int64(len(archive)) + 1<<20}}, "bytes after decompression")
	mustConvert(t, archive)
}

// setSize writes a size into the first header and makes its checksum right.
func setSize(archive []byte, field []byte) []byte {
	out := bytes.Clone(archive)
	copy(out[124:136], field)
	copy(out[148:156], "        ")
	sum := 0
	for _, b := range out[:512] {
		sum += int(b)
	}
	copy(out[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return out
}

func base256(n int64) []byte {
	b := make([]byte, 12)
	binary.BigEndian.PutUint64(b[4:], uint64(n))
	b[0] = 0x80
	if n < 0 {
		copy(b[:4], "\xff\xff\xff\xff")
	}
	return b
}

// Sizes that no file has. (S93)
func TestSizes(t *testing.T) {
	archive := tarOf(t, file("a"), file("b"))
	for name, tc := range map[string]struct {
		field   []byte
		message string
	}{
		"negative":      {base256(-1), "malformed tar header"},
		"most negative": {base256(-1 << 63), "malformed tar header"},
		"most":          {base256(1<<63 - 1), "truncated"},
		"overflow":      {append([]byte{0x80, 0, 0, 1}, make([]byte, 8)...), "malformed tar header"},
		"8 GiB":         {[]byte("77777777777\x00"), "truncated"},
		"not a number":  {[]byte("12345x78901\x00"), "malformed tar header"},
	} {
		t.Run(name, func(t *testing.T) { wantInvalid(t, setSize(archive, tc.field), Options{}, tc.message) })
	}
}

// pax makes a tar of one file with the given PAX records, which archive/tar
// would not write.
func pax(t *testing.T, records map[string]string, data string) []byte {
	var body string
	for k, v := range records {
		n := len(k) + len(v) + 3
		for len(strconv.Itoa(n))+len(k)+len(v)+3 != n {
			n++
		}
		body += fmt.Sprintf("%d %s=%s\n", n, k, v)
	}
	head := tarOf(t, text("PaxHeaders/x", body))
	head[156] = 'x'
	head = setSize(head, []byte(fmt.Sprintf("%011o\x00", len(body))))
	return append(head[:len(head)-1024], tarOf(t, text("x", data))...)
}

// Sparse files: holes become zeros, and sizes that cannot be are refused.
func TestSparse(t *testing.T) {
	sparse := func(size, m, data string) []byte {
		return pax(t, map[string]string{
			"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "s",
			"GNU.sparse.size": size, "GNU.sparse.numblocks": strconv.Itoa((strings.Count(m, ",") + 1) / 2), "GNU.sparse.map": m,
		}, data)
	}
	whole := mustConvert(t, sparse("10", "3,4", "data")).tree
	if diff := cmp.Diff(map[string]string{"s": "= \x00\x00\x00data\x00\x00\x00"}, whole); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
	for name, archive := range map[string][]byte{
		"8 EiB":           sparse("9223372036854775807", "0,4", "data"),
		"40 GiB":          sparse(strconv.Itoa(40<<30), "0,4", "data"),
		"negative":        sparse("-1", "0,4", "data"),
		"map beyond size": sparse("10", "8,4", "data"),
		"overlapping":     sparse("10", "0,2,1,2", "data"),
		"overflowing":     sparse("10", "9223372036854775807,4", "data"),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := convertBytes(t, archive, Options{}); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
				t.Errorf("%v, want invalid", err)
			}
		})
	}
}

// An archive within an archive is a file.
func TestNestedArchive(t *testing.T) {
	inner := string(testutil.Gzip(t, tarOf(t, file("../../etc/passwd"))))
	if got := mustConvert(t, tarOf(t, text("inner.tar.gz", inner))).tree; got["inner.tar.gz"] != "= "+inner || len(got) != 1 {
		t.Errorf("%d files", len(got))
	}
}

// fullDisk refuses to grow beyond a size.
type fullDisk struct {
	memFile
	most int64
}

func (f *fullDisk) WriteAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > f.most {
		return 0, &os.PathError{Op: "write", Path: "scratch", Err: syscall.ENOSPC}
	}
	return f.memFile.WriteAt(p, off)
}

func TestFullDisk(t *testing.T) {
	// What may be a blob of an image goes to the scratch, all else to the image.
	archive := tarOf(t, text("a", strings.Repeat("x", 3<<20)), text("blobs/b", strings.Repeat("x", 3<<20)))
	for name, files := range map[string][2]File{
		"scratch": {&memFile{}, &fullDisk{most: 1 << 20}},
		"image":   {&fullDisk{most: 1 << 20}, &memFile{}},
	} {
		_, err := Convert(bytes.NewReader(archive), files[0], files[1], Options{})
		if err == nil || dsec.CodeOf(err) != dsec.CodeExhausted || strings.Contains(err.Error(), "scratch") {
			t.Errorf("%s: %v, want exhausted without a path", name, err)
		}
	}
}

// A stream that its sender broke off is not the archive's fault.
func TestBrokenStream(t *testing.T) {
	broken := errors.New("connection reset")
	archive := tarOf(t, text("a", strings.Repeat("x", 3<<20)))
	for name, data := range map[string][]byte{"plain": archive, "gzip": testutil.Gzip(t, archive), "zstd": zstdOf(t, archive)} {
		r := io.MultiReader(bytes.NewReader(data[:len(data)/2]), errReader{broken})
		if _, err := Convert(r, &memFile{}, &memFile{}, Options{}); !errors.Is(err, broken) {
			t.Errorf("%s: %v, want the reader's error", name, err)
		}
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestOnRealFiles(t *testing.T) {
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	image := open("image")
	archive := tarOf(t, file("a"), text("b", strings.Repeat("\x00", 4<<20)), link("c", "a"))
	if _, err := Convert(bytes.NewReader(archive), image, open("scratch"), Options{}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(image.Name())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, mustConvert(t, archive).image) {
		t.Error("the image in a file differs from that in memory")
	}
}
