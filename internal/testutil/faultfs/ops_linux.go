package faultfs

import (
	"bytes"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// faulty has each request meet its fault.
type faulty struct {
	fuse.RawFileSystem
	fs *FS
}

func (f *faulty) Lookup(cancel <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	return f.fs.meet(Lookup, func() fuse.Status { return f.RawFileSystem.Lookup(cancel, header, name, out) })
}

func (f *faulty) GetAttr(cancel <-chan struct{}, input *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	return f.fs.meet(GetAttr, func() fuse.Status { return f.RawFileSystem.GetAttr(cancel, input, out) })
}

func (f *faulty) SetAttr(cancel <-chan struct{}, input *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	return f.fs.meet(SetAttr, func() fuse.Status { return f.RawFileSystem.SetAttr(cancel, input, out) })
}

func (f *faulty) Mkdir(cancel <-chan struct{}, input *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return f.fs.meet(Mkdir, func() fuse.Status { return f.RawFileSystem.Mkdir(cancel, input, name, out) })
}

func (f *faulty) Create(cancel <-chan struct{}, input *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	return f.fs.meet(Create, func() fuse.Status { return f.RawFileSystem.Create(cancel, input, name, out) })
}

func (f *faulty) Tmpfile(cancel <-chan struct{}, input *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	return f.fs.meet(Tmpfile, func() fuse.Status { return f.RawFileSystem.Tmpfile(cancel, input, out) })
}

func (f *faulty) Open(cancel <-chan struct{}, input *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return f.fs.meet(Open, func() fuse.Status { return f.RawFileSystem.Open(cancel, input, out) })
}

func (f *faulty) Flush(cancel <-chan struct{}, input *fuse.FlushIn) fuse.Status {
	return f.fs.meet(Flush, func() fuse.Status { return f.RawFileSystem.Flush(cancel, input) })
}

func (f *faulty) Fsync(cancel <-chan struct{}, input *fuse.FsyncIn) fuse.Status {
	return f.fs.meet(Fsync, func() fuse.Status { return f.RawFileSystem.Fsync(cancel, input) })
}

func (f *faulty) FsyncDir(cancel <-chan struct{}, input *fuse.FsyncIn) fuse.Status {
	return f.fs.meet(FsyncDir, func() fuse.Status { return f.RawFileSystem.FsyncDir(cancel, input) })
}

func (f *faulty) Unlink(cancel <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	return f.fs.meet(Unlink, func() fuse.Status { return f.RawFileSystem.Unlink(cancel, header, name) })
}

func (f *faulty) Link(cancel <-chan struct{}, input *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	return f.fs.meet(Link, func() fuse.Status { return f.RawFileSystem.Link(cancel, input, name, out) })
}

func (f *faulty) OpenDir(cancel <-chan struct{}, input *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return f.fs.meet(OpenDir, func() fuse.Status { return f.RawFileSystem.OpenDir(cancel, input, out) })
}

func (f *faulty) ReadDir(cancel <-chan struct{}, input *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.fs.meet(ReadDir, func() fuse.Status { return f.RawFileSystem.ReadDir(cancel, input, out) })
}

func (f *faulty) StatFs(cancel <-chan struct{}, input *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	return f.fs.meet(StatFS, func() fuse.Status { return f.RawFileSystem.StatFs(cancel, input, out) })
}

func (f *faulty) Rename(cancel <-chan struct{}, input *fuse.RenameIn, oldName, newName string) fuse.Status {
	op := Rename
	if input.Flags != 0 {
		op = Rename2
	}
	return f.fs.meet(op, func() fuse.Status { return f.RawFileSystem.Rename(cancel, input, oldName, newName) })
}

func (f *faulty) Read(cancel <-chan struct{}, input *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	var result fuse.ReadResult
	fault := f.fs.wait(Read)
	status := f.fs.do(fault, func() (status fuse.Status) {
		result, status = f.RawFileSystem.Read(cancel, input, buf)
		return status
	})
	if !status.Ok() {
		return nil, status
	}
	if fault.Lie && result.Size() > 0 {
		b, status := result.Bytes(buf)
		if !status.Ok() {
			return nil, status
		}
		lie := bytes.Clone(b)
		lie[0] ^= 1
		result.Done()
		result = fuse.ReadResultData(lie)
	}
	f.fs.mu.Lock()
	f.fs.read += int64(result.Size())
	f.fs.mu.Unlock()
	return result, status
}

func (f *faulty) Write(cancel <-chan struct{}, input *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	var n uint32
	status := f.fs.meet(Write, func() (status fuse.Status) {
		n, status = f.RawFileSystem.Write(cancel, input, data)
		return status
	})
	return n, status
}

// Writev and CopyFileRange have the kernel send what Write and Read are for.
func (f *faulty) Writev(<-chan struct{}, *fuse.WriteIn, [][]byte) (uint32, fuse.Status) {
	return 0, fuse.ENOSYS
}

func (f *faulty) CopyFileRange(<-chan struct{}, *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	return 0, fuse.ENOSYS
}
