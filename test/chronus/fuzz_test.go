package chronus_test

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
)

// FuzzInput gives bytes to the fuzz harness of chronus (chronus/fuzz.c), which
// is its real code with the sanitizers of the C compiler. The first byte says
// what reads the rest: a connection before Setup (0) or after (1), the files of
// users and groups (2), files of cgroups and the status of a session (3).
func FuzzInput(f *testing.F) {
	if err := exec.Command("sh", "-c", "echo 'int main(void){return 0;}' | gcc -fsanitize=address,undefined -x c -o /dev/null -").Run(); err != nil {
		f.Skip("gcc has no sanitizers here: ", err)
	}
	harness := made(f, program("fuzz", "../../chronus/build", "--fuzz", "OUT"))
	seeds := []string{
		startFrame(nil), startFrame(map[string]string{"detach": "\x00", "pty": "\x01\x00\x18\x00\x50"}),
		startFrame(map[string]string{"stdin": str("input"), "open stdin": "\x01", "env": u32(1) + str("A=b"), "user": str("0:0"), "cwd": str("/tmp")}),
		startFrame(map[string]string{"argv": u32(0), "shell": str("true"), "timeout": u32(0) + u32(1e6), "output limit": u32(0) + u32(1)}),
		startFrame(nil) + frame(3, u32(0), u32(1), u32(0), u32(0)) + frame(4) + frame(5, u32(0), u32(1), u32(9), "\x01"),
		frame(8, u32(0), str(""), str("")) + frame(9, str("s1"), str("true"), u32(0), u32(0), u32(0), u32(0)) + frame(10) + frame(23, str("s1")) + frame(11, str("s1")),
		frame(6, u32(0), u32(1), "\x01", str("data")) + frame(7, u32(0), u32(1), "\x00\x18\x00\x50"),
		frame(callStat, str("/"), "\x00"), frame(callWrite, str("/x"), u32(0), str(""), "\x00") + frame(frameData, "x") + frame(0x84) + frame(callInfo),
		frame(callStartTagged, u32(0), u32(9), startFrame(nil)[5:]) + frame(callFindTag, u32(0), u32(9)) + frame(callStartTagged, u32(0), u32(9), startFrame(nil)[5:]) + frame(callForgetTag, u32(0), u32(9)),
		frame(callFindTag, u32(0), u32(9)) + frame(callStartTagged, u32(0), u32(9), startFrame(nil)[5:]) + frame(callFindTag, u32(0), u32(0)),
		frame(24, "\x01") + startFrame(map[string]string{"timeout": u32(0) + u32(1)}) + frame(24, "\x00"), frame(21, u32(0)), frame(22, "\x00\x00\x00\x00\x00") + startFrame(nil), frame(frameMore, "\x00") + frame(callInfo), frame(callStart, u32(1<<32-1)),
	}
	for _, s := range seeds {
		f.Add([]byte("\x00" + preface + s))
		f.Add([]byte("\x01" + preface + s))
		f.Add([]byte("\x01" + preface + s[:len(s)/2]))
		f.Add([]byte("\x01" + preface + s + s))
		f.Add([]byte("\x01dsec\x02" + s))
	}
	for _, user := range []string{"root", "0", "7:8", "nobody:adm", "-1", "4294967295", ":", "a:", ""} {
		f.Add([]byte("\x02" + user + "\x00root:x:0:0::/root:/bin/sh\nnobody:x:7:8:n:/:\nadm:x:4:root,nobody\nbad:x:y:z::::\n:::::::::::\nadm:x:4294967296:a"))
	}
	f.Add([]byte("\x0312\n13\n\n1\n99999999999999999999\n5"))
	f.Add([]byte("\x03populated 1\nfrozen 0\npopulated x"))
	f.Add([]byte("\x0312 255"))
	f.Add([]byte("\x03" + strings.Repeat("\xc2\x80\xff\"\\\n", 300)))
	f.Fuzz(func(t *testing.T, in []byte) {
		cmd := exec.Command(harness)
		cmd.Stdin = bytes.NewReader(in)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%v\n%s", err, out)
		}
	})
}
