package daemon

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// FuzzDataCodec wants every message to be decoded as the library does.
func FuzzDataCodec(f *testing.F) {
	for _, m := range []*dsecv1.ImportLayerRequest{
		{},
		{Message: &dsecv1.ImportLayerRequest_Open{Open: &dsecv1.ImportLayerOpen{Name: "a"}}},
		{Message: &dsecv1.ImportLayerRequest_Data{}},
		{Message: &dsecv1.ImportLayerRequest_Data{Data: []byte("data")}},
		{Message: &dsecv1.ImportLayerRequest_Data{Data: bytes.Repeat([]byte("data"), dataSize/4)}},
		{Message: &dsecv1.ImportLayerRequest_Data{Data: bytes.Repeat([]byte("more"), dataSize/3)}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(append(bytes.Clone(b), b...))         // of two fields the last counts
		f.Add(append(bytes.Clone(b), 0x18, 0x01))   // a field that there is not
		f.Add(append([]byte{0x18, 0x01}, b...))     // the same, first
		f.Add(append(bytes.Clone(b), 0x12, 0x7f))   // cut off
		f.Add(append([]byte{0x92, 0x00}, b[:0]...)) // a tag that could be shorter, and no value
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, pair := range [][2]proto.Message{
			{&dsecv1.ImportLayerRequest{}, &dsecv1.ImportLayerRequest{}}, {&dsecv1.WriteRequest{}, &dsecv1.WriteRequest{}},
			{&dsecv1.UploadRequest{}, &dsecv1.UploadRequest{}}, {&dsecv1.InspectLayerRequest{}, &dsecv1.InspectLayerRequest{}},
		} {
			want, got := proto.Unmarshal(b, pair[0]), dataCodec{}.Unmarshal(b, pair[1])
			if (want == nil) != (got == nil) {
				t.Fatalf("%v, want %v", got, want)
			}
			if want == nil && !proto.Equal(pair[0], pair[1]) {
				t.Fatalf("%v, want %v", pair[1], pair[0])
			}
		}
	})
}

// What was given back is used again, and not before.
func TestFreeData(t *testing.T) {
	m := &dsecv1.ImportLayerRequest{Message: &dsecv1.ImportLayerRequest_Data{Data: bytes.Repeat([]byte("a"), dataSize/2)}}
	b, err := dataCodec{}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var first, second dsecv1.ImportLayerRequest
	for _, m := range []*dsecv1.ImportLayerRequest{&first, &second} {
		if err := (dataCodec{}).Unmarshal(b, m); err != nil {
			t.Fatal(err)
		}
	}
	clear(second.GetData())
	if !bytes.Equal(first.GetData(), m.GetData()) {
		t.Error("two messages share their data")
	}
	FreeData(first.GetData())
	FreeData(nil)
	FreeData(make([]byte, 10))
	allocs := testing.AllocsPerRun(100, func() {
		var m dsecv1.ImportLayerRequest
		if err := (dataCodec{}).Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		FreeData(m.GetData())
	})
	if allocs > 4 {
		t.Errorf("%v allocations a message", allocs)
	}
}
