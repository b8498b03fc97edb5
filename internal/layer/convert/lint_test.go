package convert

import (
	"slices"
	"strings"
	"testing"
)

// What an import is told of. (S46)
func TestFindings(t *testing.T) {
	const hash = "1111111111111111111111111111111111111111"
	git := func(extra ...entry) []entry {
		return append([]entry{
			text("repo/.git/HEAD", "ref: refs/heads/main\n"), text("repo/.git/refs/heads/main", hash), dir("repo/.git/objects/"),
			text("repo/.git/packed-refs", "# pack-refs with: peeled\n"+hash+" refs/heads/main\n"),
		}, extra...)
	}
	for _, tc := range []struct {
		name    string
		entries []entry
		want    string // part of a finding; empty: none at all
	}{
		{"clean", []entry{text("etc/passwd", "root:x:0:0"), text("a.go", "package a // BEGIN PRIVATE")}, ""},
		{"rsa key", []entry{text("root/.ssh/id_rsa", "-----BEGIN RSA PRIVATE KEY-----\nMIIE")}, `"/root/.ssh/id_rsa": holds what looks like a private key`},
		{"openssh key", []entry{text("k", "x\n-----BEGIN OPENSSH PRIVATE KEY-----\n")}, "a private key"},
		{"public key", []entry{text("k", "-----BEGIN PUBLIC KEY-----\n")}, ""},
		{"aws", []entry{text("env", "export AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE")}, "an AWS access key"},
		{"not aws", []entry{text("env", "AKIA is a prefix")}, ""},
		{"github", []entry{text("t", "ghp_"+strings.Repeat("a1", 18))}, "a GitHub token"},
		{"npm", []entry{text("root/.npmrc", "//registry.example/:_authToken=abc")}, "holds credentials"},
		{"npm from the environment", []entry{text("root/.npmrc", "//registry.example/:_authToken=${TOKEN}")}, ""},
		{"pypi", []entry{text("root/.pypirc", "[pypi]\npassword = x")}, "holds credentials"},
		{"netrc", []entry{text("root/.netrc", "machine m login l password p")}, "holds credentials"},
		{"docker", []entry{text("root/.docker/config.json", `{"auths":{"r":{"auth":"eDp5"}}}`)}, "holds credentials"},
		{"some config.json", []entry{text("app/config.json", `{"auth":"none"}`)}, ""},
		{"platform", []entry{file(".dsec-answer")}, "a name that the platform uses"},
		{"git", git(), ""},
		{"git reflog", git(file("repo/.git/logs/HEAD")), `"/repo/.git": git: reflogs`},
		{"git packed branch", git(text("repo/.git/packed-refs", hash+" refs/heads/main\n"+hash+" refs/remotes/origin/fix\n")), "git: 1 references besides"},
		{"git branch", git(text("repo/.git/refs/heads/answer", hash)), "git: 1 references besides"},
		{"git fetch", git(text("repo/.git/FETCH_HEAD", hash)), "FETCH_HEAD"},
		{"git reset", git(text("repo/.git/ORIG_HEAD", hash)), "ORIG_HEAD"},
		{"bare", []entry{text("r.git/HEAD", "ref: refs/heads/main"), dir("r.git/objects/"), text("r.git/refs/heads/x", hash)}, "git: 1 references"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := mustConvert(t, tarOf(t, tc.entries...)).Findings
			if tc.want == "" && len(got) > 0 || tc.want != "" && !slices.ContainsFunc(got, func(f string) bool { return strings.Contains(f, tc.want) }) {
				t.Errorf("findings %q, want %q", got, tc.want)
			}
		})
	}
}

// Names in findings are made safe, and their number is bounded.
func TestFindingsAreBounded(t *testing.T) {
	var entries []entry
	for i := range 500 {
		entries = append(entries, text(strings.Repeat("\x1b[31m", 10)+strings.Repeat("n", i%100)+"\n"+string(rune('a'+i%26))+strings.Repeat("/d", i/100)+"/id", "-----BEGIN PRIVATE KEY-----"))
	}
	got := mustConvert(t, tarOf(t, entries...)).Findings
	if len(got) > maxFindings+1 || !strings.Contains(got[len(got)-1], "findings more") {
		t.Errorf("%d findings, the last %q", len(got), got[len(got)-1])
	}
	for _, f := range got {
		if strings.ContainsAny(f, "\x1b\n") || len(f) > 1000 {
			t.Errorf("unsafe finding %q", f)
		}
	}
}

// What a higher layer hides is not looked at: it is not in the image.
func TestFindingsOfHidden(t *testing.T) {
	got := mustConvert(t, layout(t, testImage{layers: layers(t, []entry{text("key", "-----BEGIN PRIVATE KEY-----")}, []entry{file(".wh.key")})}))
	if len(got.Findings) > 0 {
		t.Errorf("findings %q", got.Findings)
	}
}
