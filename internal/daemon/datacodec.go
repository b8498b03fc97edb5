package daemon

import (
	"fmt"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// DataCodec is the library's codec of binary messages, but for one thing: the data of
// uploads, of which there may be gigabytes, are put in memory that is used again.
func DataCodec() connect.HandlerOption { return connect.WithCodec(dataCodec{}) }

type dataCodec struct{}

// Name implements connect.Codec.
func (dataCodec) Name() string { return "proto" }

// Marshal implements connect.Codec.
func (c dataCodec) Marshal(msg any) ([]byte, error) { return c.MarshalAppend(nil, msg) }

// MarshalAppend is what the library looks for.
func (dataCodec) MarshalAppend(dst []byte, msg any) ([]byte, error) {
	return marshal(proto.MarshalOptions{}, dst, msg)
}

// MarshalStable is what the library looks for.
func (dataCodec) MarshalStable(msg any) ([]byte, error) {
	return marshal(proto.MarshalOptions{Deterministic: true}, nil, msg)
}

// IsBinary is what the library looks for.
func (dataCodec) IsBinary() bool { return true }

func marshal(o proto.MarshalOptions, dst []byte, msg any) ([]byte, error) {
	m, ok := msg.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is not a message", msg)
	}
	return o.MarshalAppend(dst, m)
}

// Unmarshal implements connect.Codec.
func (dataCodec) Unmarshal(b []byte, msg any) error {
	m, ok := msg.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is not a message", msg)
	}
	if data, ok := onlyData(b); ok {
		switch m := msg.(type) {
		case *dsecv1.ImportLayerRequest:
			m.Reset()
			m.Message = &dsecv1.ImportLayerRequest_Data{Data: keepData(data)}
			return nil
		case *dsecv1.WriteRequest:
			m.Reset()
			m.Message = &dsecv1.WriteRequest_Data{Data: keepData(data)}
			return nil
		case *dsecv1.UploadRequest:
			m.Reset()
			m.Message = &dsecv1.UploadRequest_Data{Data: keepData(data)}
			return nil
		}
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("unmarshal into %T: %w", msg, err)
	}
	return nil
}

// dataField is the number of the field data in all of these messages.
const dataField = 2

// onlyData gives the data of a message that is nothing else.
func onlyData(b []byte) ([]byte, bool) {
	num, kind, n := protowire.ConsumeTag(b)
	if n < 0 || num != dataField || kind != protowire.BytesType {
		return nil, false
	}
	data, m := protowire.ConsumeBytes(b[n:])
	return data, m >= 0 && n+m == len(b)
}

// dataSize is as much as our clients send in one message.
const dataSize = 256 << 10

var dataPool = sync.Pool{New: func() any { return new([dataSize]byte) }}

func keepData(b []byte) []byte {
	if len(b) > dataSize || len(b) < dataSize/16 {
		return append([]byte{}, b...)
	}
	p := dataPool.Get().(*[dataSize]byte)
	return p[:copy(p[:], b)]
}

// FreeData takes back the data of a message that nobody uses any more: what
// GetData gave, whole.
func FreeData(b []byte) {
	if cap(b) == dataSize {
		dataPool.Put((*[dataSize]byte)(b[:dataSize]))
	}
}
