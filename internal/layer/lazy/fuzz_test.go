package lazy

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func smallImage() *Image {
	return &Image{Key: "k", Size: 3*MinChunk + 5, ChunkSize: MinChunk, Hashes: bytes.Repeat([]byte{7}, 4*32)}
}

func FuzzMap(f *testing.F) {
	im := smallImage()
	for _, states := range [][]chunkState{make([]chunkState, 4), {present, doubtful, absent, 77}, {present}} {
		f.Add(marshalMap(im, "0123", states))
		f.Add(marshalMap(im, "another", states))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		states, err := parseMap(b, im, "0123")
		if err != nil {
			return
		}
		if len(states) != int(im.chunks()) {
			t.Fatalf("%d states", len(states))
		}
		known := bytes.HasPrefix(b, marshalMap(im, "0123", nil))
		for i, s := range states {
			on := chunkState(b[mapHeader+i])
			if s == present && (on != present || !known) || s == absent && (on == present || on == doubtful) {
				t.Errorf("chunk %d: %d of %d", i, s, on)
			}
		}
		if again, err := parseMap(marshalMap(im, "0123", states), im, "0123"); err != nil || !slices.Equal(again, states) {
			t.Errorf("written and read again: %v, %v", again, err)
		}
	})
}

func FuzzMeta(f *testing.F) {
	f.Add(marshalMeta(smallImage()))
	f.Add([]byte(metaMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		im, err := parseMeta(b)
		if err != nil {
			return
		}
		if err := im.Validate(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(marshalMeta(im), b) {
			t.Error("another file of the same image")
		}
	})
}

func FuzzPacket(f *testing.F) {
	for _, m := range []message{{Hello: &hello{Version: 1, Holds: 2}}, {ID: 7, Open: &openCall{FUSE}}, {Reply: &reply{Error: &wireError{Code: "lost"}}},
		{Event: &Event{Kind: EventLost}}, {Stats: true}} {
		b, err := json.Marshal(&m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, []byte{}, 0)
	}
	// As the kernel writes them, but of descriptors that cannot be: what is parsed is closed.
	f.Add([]byte("{}"), unix.UnixRights(1<<20, 1<<20+1), 0)
	f.Add([]byte("{"), unix.UnixRights(1<<20), unix.MSG_CTRUNC)
	f.Fuzz(func(t *testing.T, b, oob []byte, flags int) {
		if messages, err := unix.ParseSocketControlMessage(oob); err == nil {
			for i := range messages {
				fds, _ := unix.ParseUnixRights(&messages[i])
				for _, fd := range fds {
					if fd < 1<<20 { // one of this process: the kernel would not have made it up
						return
					}
				}
			}
		}
		m, files, err := decode(b, oob, flags)
		if (m == nil) != (err != nil) || err != nil && len(files) > 0 {
			t.Errorf("%v, %d files, %v", m, len(files), err)
		}
		if m != nil && m.Hello != nil {
			group, events, dev, mnt, err := m.Hello.split(files)
			if err == nil && len(some(group, events, dev, mnt)) != len(files) {
				t.Error("files are forgotten")
			}
		}
		closeFiles(files)
	})
}

func FuzzSlot(f *testing.F) {
	b := make([]byte, slotSize)
	f.Add(b)
	b[0], b[4], b[24] = eventSize, unix.FANOTIFY_METADATA_VERSION, unix.FAN_EVENT_INFO_TYPE_RANGE
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < slotSize {
			return
		}
		e, ok := parseSlot(b[:slotSize:slotSize])
		if ok && !e.broken && (e.r.Offset < 0 || e.r.Length <= 0) {
			t.Errorf("%+v", e)
		}
		im := smallImage()
		if first, end := im.span(e.r); first < 0 || end > im.chunks() || first > end {
			t.Errorf("chunks %d to %d of %+v", first, end, e)
		}
	})
}

// No request of the FUSE protocol, which the kernel writes, can end the server.
func FuzzFUSERequest(f *testing.F) {
	c := &cache{images: map[string]*image{}, nodes: map[uint64]*image{}, limits: Limits{}.withDefaults()}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		f.Fatal(err)
	}
	for _, op := range []byte{opLookup, opForget, opGetattr, opOpen, opRead, opStatfs, opRelease, opInit, opInterrupt, opDestroy, opBatchForget, 99} {
		for _, n := range []int{3, 40, 48, 80, 104} {
			b := make([]byte, n)
			if n > 4 {
				b[4] = op
			}
			f.Add(b)
		}
	}
	f.Fuzz(func(_ *testing.T, b []byte) {
		s := makeFUSEServer(c, null)
		s.handle(b)
		s.close()
	})
}
