// Command sbom writes what a built binary is made of: an SPDX 2.3 document and
// the licence texts of every module in it.
//
//	sbom bin/dsec dist        -> dist/dsec.spdx.json, dist/THIRD_PARTY_NOTICES
//
// It reads the modules from the binary itself, so that it tells what was
// linked and not what go.mod allows, and adds the C library that chronus inside
// it is linked with. A component whose licence it cannot name, or whose licence
// is not on the list of those that an Apache-2.0 program may be distributed
// with, is an error.
package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/google/licensecheck"
)

// allowed are the licences that may be linked into the binary.
var allowed = []string{"Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "CC0-1.0", "Unlicense", "0BSD"}

// chosen is the licence that we take of a module that offers a choice, and the
// words in which its own text offers it.
var chosen = map[string]struct{ id, offer string }{
	"kernel.org/pub/linux/libs/security/libcap/psx": {"BSD-3-Clause", "SPDX-License-Identifier: BSD-3-Clause OR GPL-2.0-only"},
}

// covered is how much of a licence file its known text must make up; the rest
// is copyright lines.
const covered = 75.0

// component is one module of the binary, or the C library.
type component struct {
	path, version, sum string
	purl               string // package URL
	licence            string // SPDX expression
	texts              []text
}

type text struct{ file, content string }

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: sbom BINARY DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(binary, dir string) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	components, err := collect(info)
	if err != nil {
		return err
	}
	libc, err := musl()
	if err != nil {
		return err
	}
	components = append(components, libc)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	document, err := json.MarshalIndent(spdx(info, components), "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "dsec.spdx.json"), append(document, '\n'), 0o644); err != nil {
		return err
	}
	var notices bytes.Buffer
	writeNotices(&notices, components)
	return os.WriteFile(filepath.Join(dir, "THIRD_PARTY_NOTICES"), notices.Bytes(), 0o644)
}

// collect finds the licence of each module and of Go itself.
func collect(info *debug.BuildInfo) ([]component, error) {
	root, err := goEnv("GOROOT")
	if err != nil {
		return nil, err
	}
	components := []component{{path: "std", version: info.GoVersion, purl: purl("std", info.GoVersion)}}
	dirs := []string{root}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		dir, err := moduleDir(m)
		if err != nil {
			return nil, err
		}
		components = append(components, component{path: m.Path, version: m.Version, sum: m.Sum, purl: purl(m.Path, m.Version)})
		dirs = append(dirs, dir)
	}
	var problems []error
	for i := range components {
		if err := components[i].read(dirs[i]); err != nil {
			problems = append(problems, err)
		}
	}
	return components, errors.Join(problems...)
}

func purl(module, version string) string { return "pkg:golang/" + module + "@" + version }

func goEnv(name string) (string, error) {
	out, err := exec.Command("go", "env", name).Output()
	return strings.TrimSpace(string(out)), err
}

func moduleDir(m *debug.Module) (string, error) {
	out, err := exec.Command("go", "mod", "download", "-json", m.Path+"@"+m.Version).Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", m.Path, err)
	}
	var found struct{ Dir string }
	if err := json.Unmarshal(out, &found); err != nil {
		return "", fmt.Errorf("%s: %w", m.Path, err)
	}
	return found.Dir, nil
}

var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|copyright|unlicense|patents)([.-].*)?$`)

// read finds the licence and notice files at the top of a module.
func (c *component) read(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var ids []string
	for _, e := range entries {
		if !e.Type().IsRegular() || !licenceFile.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		c.texts = append(c.texts, text{e.Name(), string(b)})
		if strings.HasPrefix(strings.ToLower(e.Name()), "patents") {
			continue // grants more and asks nothing
		}
		found := licensecheck.Scan(b)
		if found.Percent < covered {
			continue // a notice, or a file that only points at others
		}
		ids = addIDs(ids, found)
	}
	if choice, ok := chosen[c.path]; ok && slices.ContainsFunc(c.texts, func(t text) bool { return strings.Contains(t.content, choice.offer) }) {
		ids = []string{choice.id}
	}
	return c.name(ids)
}

func addIDs(ids []string, found licensecheck.Coverage) []string {
	for _, m := range found.Match {
		if !slices.Contains(ids, m.ID) {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// name says that the component is under all of these licences.
func (c *component) name(ids []string) error {
	if len(ids) == 0 {
		return fmt.Errorf("%s@%s: no licence file that is known", c.path, c.version)
	}
	for _, id := range ids {
		if !slices.Contains(allowed, id) {
			return fmt.Errorf("%s@%s: licence %s is not one of %s", c.path, c.version, id, strings.Join(allowed, " "))
		}
	}
	slices.Sort(ids)
	c.licence = strings.Join(ids, " AND ")
	return nil
}

// musl is the C library that chronus is linked with, as Debian packages it. Its
// copyright file names the licence of each part, in the words of each.
func musl() (component, error) {
	version, err := exec.Command("dpkg-query", "-W", "-f", "${Version}", "musl-dev").Output()
	if err != nil {
		return component{}, fmt.Errorf("musl: %w", err)
	}
	const file = "/usr/share/doc/musl-dev/copyright"
	b, err := os.ReadFile(file)
	if err != nil {
		return component{}, err
	}
	c := component{path: "musl", version: string(version), texts: []text{{filepath.Base(file), string(b)}}}
	c.purl = "pkg:deb/debian/musl@" + c.version
	return c, c.name(addIDs(nil, licensecheck.Scan(b)))
}

func writeNotices(w io.Writer, components []component) {
	fmt.Fprintf(w, "dsec is built with the following third-party software.\n")
	for _, c := range components {
		fmt.Fprintf(w, "\n%s\n%s %s (%s)\n", strings.Repeat("=", 78), c.path, c.version, c.licence)
		for _, t := range c.texts {
			fmt.Fprintf(w, "\n--- %s\n\n%s\n", t.file, strings.TrimSpace(t.content))
		}
	}
}

// The parts of an SPDX 2.3 document that we fill.
type document struct {
	Version           string         `json:"spdxVersion"`
	DataLicense       string         `json:"dataLicense"`
	ID                string         `json:"SPDXID"`
	Name              string         `json:"name"`
	DocumentNamespace string         `json:"documentNamespace"`
	CreationInfo      creation       `json:"creationInfo"`
	Packages          []spdxPackage  `json:"packages"`
	Relationships     []relationship `json:"relationships"`
}

type creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID               string        `json:"SPDXID"`
	Name             string        `json:"name"`
	Version          string        `json:"versionInfo,omitempty"`
	DownloadLocation string        `json:"downloadLocation"`
	FilesAnalyzed    bool          `json:"filesAnalyzed"`
	LicenseConcluded string        `json:"licenseConcluded"`
	LicenseDeclared  string        `json:"licenseDeclared"`
	CopyrightText    string        `json:"copyrightText"`
	External         []externalRef `json:"externalRefs,omitempty"`
}

type externalRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type relationship struct {
	Element string `json:"spdxElementId"`
	Type    string `json:"relationshipType"`
	Related string `json:"relatedSpdxElement"`
}

func spdx(info *debug.BuildInfo, components []component) document {
	version := info.Main.Version
	main := spdxPackage{
		ID: "SPDXRef-dsec", Name: "dsec", Version: version, DownloadLocation: "NOASSERTION",
		LicenseConcluded: "Apache-2.0", LicenseDeclared: "Apache-2.0", CopyrightText: "NOASSERTION",
		External: []externalRef{{"PACKAGE-MANAGER", "purl", purl(info.Main.Path, version)}},
	}
	d := document{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: "dsec-" + version,
		DocumentNamespace: "https://" + info.Main.Path + "/spdx/" + version + "-" + runtime.GOARCH,
		CreationInfo:      creation{Created: created(), Creators: []string{"Tool: dsec-sbom"}},
		Packages:          []spdxPackage{main},
		Relationships:     []relationship{{"SPDXRef-DOCUMENT", "DESCRIBES", main.ID}},
	}
	for _, c := range components {
		p := spdxPackage{
			ID: "SPDXRef-" + notIDChar.ReplaceAllString(c.path+"-"+c.version, "-"), Name: c.path, Version: c.version,
			DownloadLocation: "NOASSERTION", LicenseConcluded: c.licence, LicenseDeclared: c.licence, CopyrightText: "NOASSERTION",
			External: []externalRef{{"PACKAGE-MANAGER", "purl", c.purl}},
		}
		d.Packages = append(d.Packages, p)
		d.Relationships = append(d.Relationships, relationship{main.ID, "DEPENDS_ON", p.ID})
	}
	return d
}

var notIDChar = regexp.MustCompile(`[^A-Za-z0-9.-]`)

// created is now, or what SOURCE_DATE_EPOCH says, for builds that repeat byte
// for byte.
func created() string {
	at := time.Now()
	var seconds int64
	if _, err := fmt.Sscan(os.Getenv("SOURCE_DATE_EPOCH"), &seconds); err == nil { //nolint:forbidigo // the convention for reproducible builds
		at = time.Unix(seconds, 0)
	}
	return at.UTC().Format(time.RFC3339)
}
