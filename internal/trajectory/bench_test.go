package trajectory

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func BenchmarkAction(b *testing.B) {
	for _, output := range []int{100, 4 << 10} {
		b.Run(fmt.Sprint("output=", output), func(b *testing.B) {
			l := open(b, Options{Dir: b.TempDir(), MaxBytes: 64 << 30})
			id := newSandbox(b, l)
			data := bytes.Repeat([]byte("x"), output)
			b.ReportAllocs()
			for b.Loop() {
				a, _, err := l.Begin(context.Background(), id, execOf("make -j8 test", ""))
				if err != nil {
					b.Fatal(err)
				}
				a.Output(dsecv1.Stream_STREAM_STDOUT, data)
				if err := a.End(exited(0)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFastForward asks again for actions that have ended.
func BenchmarkFastForward(b *testing.B) {
	l := open(b, Options{Dir: b.TempDir()})
	id := newSandbox(b, l)
	const actions = 1000
	for i := range actions {
		run(b, l, id, "make", fmt.Sprint("step-", i), "ok")
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		_, earlier, err := l.Begin(context.Background(), id, execOf("make", fmt.Sprint("step-", i%actions)))
		if err != nil || earlier.Ended == nil {
			b.Fatal(earlier, err)
		}
		i++
	}
}

// steps notes 1,000 actions of one sandbox and 500 of each of 100 others.
func steps(b *testing.B, dir string) dsec.SandboxID {
	l := open(b, Options{Dir: dir})
	ids := make([]dsec.SandboxID, 101)
	for i := range ids {
		ids[i] = newSandbox(b, l)
	}
	for step := range 1000 {
		for i, id := range ids {
			if i == 0 || step%2 == 0 {
				run(b, l, id, "make", fmt.Sprint("step-", step), "ok")
			}
		}
	}
	l.Close()
	return ids[0]
}

// BenchmarkReopen is of a server's start until a trajectory of 1,000 actions is
// ready for its next one.
func BenchmarkReopen(b *testing.B) {
	dir := b.TempDir()
	id := steps(b, dir)
	for b.Loop() {
		l := open(b, Options{Dir: dir})
		if earlier, err := l.Lookup(context.Background(), id, "step-999"); err != nil || earlier.Ended == nil {
			b.Fatal(earlier, err)
		}
		b.StopTimer()
		l.Close()
		b.StartTimer()
	}
}

func BenchmarkLookupFirst(b *testing.B) {
	dir := b.TempDir()
	id := steps(b, dir)
	l := open(b, Options{Dir: dir})
	for b.Loop() {
		l.mu.Lock()
		l.indexes.drop(l.sandboxes[id])
		l.mu.Unlock()
		if earlier, err := l.Lookup(context.Background(), id, "step-999"); err != nil || earlier.Ended == nil {
			b.Fatal(earlier, err)
		}
	}
}

// BenchmarkOpen is of 1 GiB of segments with 1,000 sandboxes.
func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	l := open(b, Options{Dir: dir})
	ids := make([]dsec.SandboxID, 1000)
	for i := range ids {
		ids[i] = newSandbox(b, l)
	}
	data := bytes.Repeat([]byte("x"), 16<<10)
	for i := 0; l.Stats().Bytes < 1<<30; i++ {
		a := begin(b, l, ids[i%len(ids)], "make", "")
		a.Output(dsecv1.Stream_STREAM_STDOUT, data)
		end(b, a, 0)
	}
	l.Close()
	for b.Loop() {
		l := open(b, Options{Dir: dir})
		b.StopTimer()
		l.Close()
		b.StartTimer()
	}
}

// BenchmarkOutput is of a long output, as a compiler writes it.
func BenchmarkOutput(b *testing.B) {
	l := open(b, Options{Dir: b.TempDir(), MaxSandboxOutput: 1 << 40, MaxBytes: 64 << 30})
	id := newSandbox(b, l)
	var text bytes.Buffer
	for i := 0; text.Len() < 16<<20; i++ {
		fmt.Fprintf(&text, "cc -O2 -Wall -c -o build/%x.o src/%d.c: warning: unused variable\n", i*i, i)
	}
	b.SetBytes(int64(text.Len()))
	for n := byte(0); b.Loop(); n++ {
		text.Bytes()[0] = n // each is another one
		a := begin(b, l, id, "make", "")
		for data := text.Bytes(); len(data) > 0; {
			n := min(32<<10, len(data))
			a.Output(dsecv1.Stream_STREAM_STDOUT, data[:n])
			data = data[n:]
		}
		end(b, a, 0)
	}
}

// BenchmarkInput is of a file of 64 MiB that is written: how long its bytes take past the
// log, and how much of the processors, where they are kept, and where only their digest is.
func BenchmarkInput(b *testing.B) {
	const size = 64 << 20
	var text bytes.Buffer
	for i := 0; text.Len() < size; i++ {
		fmt.Fprintf(&text, "%x: the quick brown fox of line %d\n", i*i, i)
	}
	of := map[string][]byte{"noise": noise(size), "text": text.Bytes()[:size]}
	for _, kind := range []string{"noise", "text"} {
		for _, kept := range []int64{1, size + 1024} {
			b.Run(fmt.Sprintf("%s/kept=%v", kind, kept > 1), func(b *testing.B) {
				l := open(b, Options{Dir: b.TempDir(), MaxInput: kept, MaxSandboxInput: 1 << 40, MaxBytes: 64 << 30})
				id := newSandbox(b, l)
				data := of[kind]
				b.SetBytes(size)
				busy := processorTime()
				for n := byte(0); b.Loop(); n++ {
					data[0] = n // each is another one
					a := begin(b, l, id, "write", "")
					for rest := data; len(rest) > 0; {
						n := min(32<<10, len(rest))
						a.Input(rest[:n])
						rest = rest[n:]
					}
					_ = a.InputDigest()
					end(b, a, 0)
				}
				b.ReportMetric(float64(processorTime()-busy)/1e6/float64(b.N), "cpu-ms/op")
			})
		}
	}
}

// processorTime is what this process has used of the processors, in nanoseconds.
func processorTime() int64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}
