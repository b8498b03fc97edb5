// Package blob keeps the bytes of layers where all nodes reach them: in a
// directory of a file system that they share, or in a bucket.
//
// A blob is immutable. Its key says what it is, so that a blob that is there
// need not be stored again, and nothing is ever overwritten. It is visible
// whole or not at all.
package blob

import (
	"context"
	"errors"
	"io"
	"os"
	"time"
)

// Info is what a store tells of a blob.
type Info struct {
	Key     string
	Size    int64 // bytes
	Created time.Time
}

// ErrDirectory is in the chain of a not_found where a directory has the key's name: of
// other blobs, or one that nothing should have made.
var ErrDirectory = errors.New("a directory is in its place")

// Store keeps blobs. Its methods may be called from any goroutine.
//
// Errors are *dsec.Error: invalid where an argument cannot be (see CheckKey), not_found
// where there is no such blob, conflict where there is another of that key, exhausted
// where the store is full, unsupported where it is read-only, unavailable where it
// cannot be reached or does not answer in time (repeating may help), internal where
// it answers what it must not; or those of the call's context, which ends each wait.
type Store interface {
	// Put stores size bytes of r as key, durably when it returns. A blob of that size
	// that is there already is left as it is, and r is not read. An error of r is wrapped.
	Put(ctx context.Context, key string, r io.Reader, size int64) error
	// ReadAt fills p with the bytes of a blob from off, by the rules of
	// io.ReaderAt: io.EOF is the end of the blob, and only that.
	ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error)
	// Stat tells of one blob.
	Stat(ctx context.Context, key string) (Info, error)
	// List calls f for each blob whose key begins with prefix, in order of keys.
	List(ctx context.Context, prefix string, f func(Info) error) error
	// Delete removes a blob. One that is not there is no error.
	Delete(ctx context.Context, key string) error
}

// Opener is a Store whose blobs are files that this host can read by itself,
// and the kernel can mount.
type Opener interface {
	// Open opens a blob for reading. The error is as Store's.
	Open(key string) (*os.File, error)
}

// Reopener is a Store that keeps blobs open which are read.
type Reopener interface {
	// Reopen has the next read of a blob open it anew: one that was damaged, and
	// deleted and stored again, is read as it is now.
	Reopen(key string)
}

// Rooted is an Opener for who reads blobs in a process of its own, because the
// file system that they are on may never answer.
type Rooted interface {
	// Root is the directory in which the key of each blob is its path. The caller
	// closes it.
	Root() (*os.File, error)
}

// Linker is a Store that may take over a file instead of copying it.
type Linker interface {
	// Temp makes a file without a name where Link can take it from.
	Temp() (*os.File, error)
	// Link stores the whole of a file that Temp made as key, like Put; it must
	// not be written any more.
	Link(ctx context.Context, key string, f *os.File) error
}
