// Package lazy serves big immutable files whose bytes are fetched when they are
// first read.
//
// An Image is such a file: its bytes lie in a blob store, and what was read once
// lies in a cache on local disk. The kernel asks for what is missing in one of
// two ways, the front ends: fanotify pre-content events on the sparse file of
// the cache, or a FUSE file system that offers the same file.
//
// The serving is done by layerd, a process of its own (Serve). The node agent
// talks to it through a Client, which starts it, and starts another where it
// died. A fanotify group whose last holder dies lets readers see holes as zeros,
// and a FUSE connection is cut off. So each of both processes holds all
// descriptors, and hands them to the other one's successor; what was asked and
// not answered is answered then. Where both died, Client.Lost names the images of
// which that cannot be made good any more.
//
// What holds, whatever dies when: a reader gets the bytes that Image.Hashes
// vouches for, or an error, or waits and can be killed. The one exception is the
// time between the death of both and the next Client, which is why its Lost must
// be dealt with before anything else.
package lazy

import (
	"crypto/sha256"
	"encoding/hex"
	"math/bits"

	"github.com/opendsec/dsec"
)

// The bounds of Image.ChunkSize, in bytes.
const (
	MinChunk = 64 << 10
	MaxChunk = 4 << 20
)

// maxImage is the most bytes of an image: what 2^24 of the smallest chunks hold,
// whose hashes are half a gigabyte.
const maxImage = 1 << 40

// maxKey is the most bytes of a key.
const maxKey = 1024

// Image says what a file consists of. It is trusted: a chunk is what its hash
// says.
type Image struct {
	Key       string // of its bytes in the blob store
	Size      int64  // bytes
	ChunkSize int64  // bytes, a power of two from MinChunk to MaxChunk
	Hashes    []byte // SHA-256 of each chunk, 32 bytes each; the last chunk is not padded
}

// Validate tells whether the parts fit each other. The error is invalid.
func (im *Image) Validate() error {
	switch {
	case im.Key == "" || len(im.Key) > maxKey:
		return dsec.Invalid("key", "has %d bytes, want 1 to %d", len(im.Key), maxKey)
	case im.ChunkSize < MinChunk || im.ChunkSize > MaxChunk || bits.OnesCount64(uint64(im.ChunkSize)) != 1:
		return dsec.Invalid("chunk_size", "%d, want a power of two from %d to %d", im.ChunkSize, MinChunk, MaxChunk)
	case im.Size <= 0 || im.Size > maxImage:
		return dsec.Invalid("size", "%d bytes, want 1 to %d", im.Size, int64(maxImage))
	case int64(len(im.Hashes)) != im.chunks()*sha256.Size:
		return dsec.Invalid("hashes", "%d bytes, want %d, 32 for each of %d chunks", len(im.Hashes), im.chunks()*sha256.Size, im.chunks())
	}
	return nil
}

func (im *Image) chunks() int64 { return (im.Size + im.ChunkSize - 1) / im.ChunkSize }

// chunk returns where chunk i lies.
func (im *Image) chunk(i int64) Range {
	off := i * im.ChunkSize
	return Range{off, min(im.ChunkSize, im.Size-off)}
}

// span returns the chunks that r touches: the first, and the one after the last.
// What lies beyond the image is left out.
func (im *Image) span(r Range) (first, end int64) {
	if r.Offset < 0 || r.Length <= 0 || r.Offset >= im.Size {
		return 0, 0
	}
	last := im.Size - 1
	if r.Length <= last-r.Offset {
		last = r.Offset + r.Length - 1
	}
	return r.Offset / im.ChunkSize, last/im.ChunkSize + 1
}

// name is what the files of the image are called, in the cache and in the FUSE
// file system. A key may hold what a file's name may not.
func name(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// Range is a part of an image, in bytes.
type Range struct {
	Offset int64
	Length int64
}

// FrontEnd is how the kernel asks for what is missing.
type FrontEnd string

// The front ends.
const (
	Fanotify FrontEnd = "fanotify"
	FUSE     FrontEnd = "fuse"
)

// Stats tells of one image.
type Stats struct {
	Key     string
	Chunks  int64 // of the image
	Size    int64 // bytes
	Present int64 // chunks that are on local disk and verified
	InUse   bool  // opened and not released
	Open    bool  // somebody may have it open; by fanotify, its chunks cannot go
	// Since layerd started:
	Fetched      int64  // chunks that came from the store
	FetchedBytes int64  // bytes that came from the store, unusable ones too
	Reads        int64  // times that a front end asked
	Waits        int64  // of them, those that had to wait for the store or a check
	Errors       int64  // of them, those that were answered with an error
	Corrupt      int64  // chunks of the store that were not what they must be
	Degraded     string // why the last fetch failed; empty if it did not
}

// EventKind is what an Event tells.
type EventKind string

// The kinds of events.
const (
	EventCorrupt   EventKind = "corrupt"   // the store gave a chunk that is not what its hash says
	EventDegraded  EventKind = "degraded"  // a fetch failed for good, and readers got an error; or layerd does not answer
	EventRecovered EventKind = "recovered" // the first fetch after that which did not, or layerd answers again, or another does
	EventRestarted EventKind = "restarted" // layerd died, another one has taken over
	EventLost      EventKind = "lost"      // what layerd served cannot be served on: as Client.Lost
	eventIdle      EventKind = "idle"      // nobody has a released image open any more
)

// Event is something that the operator should see.
type Event struct {
	Kind   EventKind
	Key    string `json:",omitempty"` // of the image
	Chunk  int64  `json:",omitempty"`
	Reason string `json:",omitempty"`
}
