package apiserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

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
	err := protojson.Unmarshal(data, m)
	if err == nil {
		return nil
	}
	if path := pathAt(data, err.Error()); path != "" {
		return fmt.Errorf("%w; at field %q", err, path)
	}
	return err
}

// pathAt is the field of a JSON document that an error of its decoder is about, as
// limits.memory_bytes or layers[1]; empty where it names no place.
func pathAt(data []byte, message string) string {
	m := position.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	before, after, _ := strings.Cut(m[1], ":")
	line, _ := strconv.Atoi(before)
	column, _ := strconv.Atoi(after)
	offset := 0
	for ; line > 1; line-- {
		n := bytes.IndexByte(data[offset:], '\n')
		if n < 0 {
			return ""
		}
		offset += n + 1
	}
	return path(data, int64(offset+column-1))
}

// path is the field whose value is at offset, or begins there.
func path(data []byte, offset int64) string {
	type level struct {
		array bool
		key   string // of an object: of the value that comes next; empty where a key does
		index int
	}
	var levels []level
	in := json.NewDecoder(bytes.NewReader(data))
	for {
		t, err := in.Token()
		if err != nil || in.InputOffset() > offset && t != json.Delim('}') && t != json.Delim(']') {
			break
		}
		top := len(levels) - 1
		switch t {
		case json.Delim('{'), json.Delim('['):
			levels = append(levels, level{array: t == json.Delim('[')})
			continue
		case json.Delim('}'), json.Delim(']'):
			levels = levels[:top]
			top--
		default:
			if key, ok := t.(string); ok && top >= 0 && !levels[top].array && levels[top].key == "" {
				levels[top].key = key
				continue
			}
		}
		if top >= 0 { // a value has ended
			levels[top].key = ""
			levels[top].index++
		}
	}
	var b strings.Builder
	for _, l := range levels {
		switch {
		case l.array:
			fmt.Fprintf(&b, "[%d]", l.index)
		case l.key != "" && b.Len() > 0:
			b.WriteString("." + snake(l.key))
		case l.key != "":
			b.WriteString(snake(l.key))
		}
	}
	return b.String()
}
