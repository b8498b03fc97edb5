package apiserver

import (
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strictJSON is the codec of JSON bodies. Unlike the library's own it refuses
// fields that there are not: a misspelt limit must not be a missing one.
type strictJSON struct{ name string }

// strictCodecs replaces the library's codec under both names that it goes by.
func strictCodecs() connect.HandlerOption {
	return connect.WithHandlerOptions(
		connect.WithCodec(strictJSON{"json"}),
		connect.WithCodec(strictJSON{"json; charset=utf-8"}),
	)
}

// Name implements connect.Codec.
func (c strictJSON) Name() string { return c.name }

// Marshal implements connect.Codec.
func (strictJSON) Marshal(msg any) ([]byte, error) {
	m, ok := msg.(proto.Message)
	if !ok {
		return nil, errors.New("not a message")
	}
	return protojson.Marshal(m)
}

// Unmarshal implements connect.Codec.
func (strictJSON) Unmarshal(data []byte, msg any) error {
	m, ok := msg.(proto.Message)
	if !ok {
		return errors.New("not a message")
	}
	if len(data) == 0 {
		return errors.New("proto: empty body; want at least {}")
	}
	return protojson.Unmarshal(data, m)
}
