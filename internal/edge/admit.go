package edge

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/convert"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Bounds of a create request.
const (
	maxEnvBytes  = 256 << 10
	maxLabels    = 64
	maxLabel     = 256 // characters
	maxLabelsLen = 64 << 10
	maxRequestID = 128 // characters
	maxUser      = 256
	maxPath      = 4096
	maxDuration  = 10 * 365 * 24 * time.Hour
)

// create is a checked create request.
type create struct {
	project    string
	spec       *dsec.Spec
	layerNames []string
	from       []int // of each layer of spec, the place of the one in the request that it came with
	idle       time.Duration
	lifetime   time.Duration
	requestID  string
	digest     []byte
	origin     *dsecv1.TrajectoryOrigin
	offer      *offer
	diskGiven  bool // limits.disk_bytes was in the request
	caller     string
}

// parseCreate checks everything about a request that does not depend on what
// the edge does now.
func (e *Edge) parseCreate(ctx context.Context, project string, item *dsecv1.CreateSandboxesItem) (*create, error) {
	req := item.GetRequest()
	if req == nil {
		return nil, dsec.Invalid("request", "want a create request")
	}
	c := &create{project: project, requestID: req.RequestId, layerNames: item.LayerNames, origin: item.Origin}
	c.spec = &dsec.Spec{Kind: dsec.Kind(req.Backend), Layers: req.Layers, Job: req.Job, Labels: req.Labels, User: req.User, Workdir: req.Workdir}
	if c.spec.Kind == "" {
		c.spec.Kind = dsec.KindContainer
	}
	var err error
	if c.offer, err = e.offered(c.spec.Kind); err != nil {
		return nil, err
	}
	for _, check := range []func() error{
		func() error { return checkNetwork(req.NetworkRules) },
		func() error { return checkText("request_id", req.RequestId, maxRequestID) },
		func() error { return checkText("job", req.Job, maxLabel) },
		func() error { return checkLabels(req.Labels) },
		func() (err error) { c.spec.IdleAction, err = idleAction(req.IdleAction); return err },
		func() error { return checkUser("user", req.User) },
		func() error { return checkWorkdir("workdir", req.Workdir) },
		func() (err error) {
			given := limitsOf(req.Limits)
			c.diskGiven = given.DiskBytes != 0
			c.spec.Limits, err = e.limits(given)
			return err
		},
		func() (err error) { c.spec.Env, err = environment("env", req.Env); return err },
		func() (err error) {
			c.idle, err = lifetime("idle_timeout", req.IdleTimeout, e.cfg.DefaultIdleTimeout)
			return err
		},
		func() (err error) {
			c.lifetime, err = lifetime("max_lifetime", req.MaxLifetime, e.cfg.DefaultMaxLifetime)
			return err
		},
		func() error { return checkOrigin(item.Origin) },
		func() error { return e.layerDefaults(ctx, c) },
	} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	c.spec.IdleTimeout, c.spec.MaxLifetime = c.idle, c.lifetime
	if c.digest = item.BodyDigest; len(c.digest) == 0 && c.requestID != "" {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
		if err != nil {
			return nil, fmt.Errorf("digest of the request: %w", err)
		}
		sum := sha256.Sum256(b)
		c.digest = sum[:]
	}
	if len(c.digest) > 64 {
		return nil, dsec.Invalid("body_digest", "want at most 64 bytes, got %d", len(c.digest))
	}
	return c, nil
}

func (e *Edge) offered(kind dsec.Kind) (*offer, error) {
	o := e.backends[kind]
	if o == nil {
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "backend", Message: fmt.Sprintf("want one of %s, got %q", e.kindNames(), kind)}
	}
	if !o.info.Load().Available {
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "backend", Message: fmt.Sprintf("%s cannot run on this node now; its log and `dsec doctor` tell why", kind)}
	}
	return o, nil
}

func (e *Edge) kindNames() string {
	names := make([]string, 0, len(e.kinds))
	for _, k := range e.kinds {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}

func checkNetwork(rules map[string]bool) error {
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		if rules[name] {
			return &dsec.Error{Code: dsec.CodeUnsupported, Field: "network_rules", Message: fmt.Sprintf("%q is true, but no network can be allowed yet: want all false, or none", name)}
		}
	}
	return nil
}

// limits fills and checks limits.
func (e *Edge) limits(given dsec.Limits) (dsec.Limits, error) {
	l := fillLimits(given, e.cfg.DefaultLimits)
	for _, f := range limitFields {
		if err := f.check(*f.of(&l), *f.of(&e.cfg.MaxLimits)); err != nil {
			return l, err
		}
	}
	return l, nil
}

// fitDisk keeps a new sandbox to what a disk that sandboxes share can give to one
// of them now, which may be less than the node's configuration.
func (c *create) fitDisk() error {
	shared, ok := c.offer.Backend.(backend.DiskSharer)
	if !ok {
		return nil
	}
	most, ok := shared.DiskMost()
	if !ok {
		return nil
	}
	if !c.diskGiven {
		c.spec.Limits.DiskBytes = min(c.spec.Limits.DiskBytes, most)
	}
	return diskBytes.check(c.spec.Limits.DiskBytes, most)
}

// idleAction reads what is to be done after the idle timeout.
func idleAction(s string) (dsec.IdleAction, error) {
	switch a := dsec.IdleAction(s); a {
	case "", dsec.IdleKill, dsec.IdlePause:
		return a, nil
	}
	return "", dsec.Invalid("idle_action", "want kill or pause, got %.32q", s)
}

// environment turns a map into KEY=VALUE, sorted.
func environment(field string, env map[string]string) ([]string, error) {
	if len(env) == 0 {
		return nil, nil
	}
	out := make([]string, 0, len(env))
	size := 0
	for k, v := range env {
		switch {
		case k == "" || strings.ContainsAny(k, "=\x00\n"):
			return nil, dsec.Invalid(field, "want names without =, NUL and newline, got %.64q", k)
		case strings.IndexByte(v, 0) >= 0:
			return nil, dsec.Invalid(field, "want values without NUL; that of %.64q has one", k)
		}
		if size += len(k) + len(v) + 2; size > maxEnvBytes {
			return nil, dsec.Invalid(field, "want at most %d bytes in all", maxEnvBytes)
		}
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return out, nil
}

func checkText(field, s string, most int) error {
	if utf8.RuneCountInString(s) > most || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return dsec.Invalid(field, "want at most %d characters, and no control characters", most)
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return dsec.Invalid("labels", "want at most %d, got %d", maxLabels, len(labels))
	}
	size := 0
	for k, v := range labels {
		if size += len(k) + len(v); size > maxLabelsLen {
			return dsec.Invalid("labels", "want at most %d bytes in all", maxLabelsLen)
		}
		if k == "" {
			return dsec.Invalid("labels", "want names that are not empty")
		}
		if err := checkText("labels", k, maxLabel); err != nil {
			return err
		}
		if err := checkText("labels", v, maxLabel); err != nil {
			return err
		}
	}
	return nil
}

// maxID is the highest user and group that a sandbox has.
const maxID = 1<<16 - 1

// checkOrigin keeps an entry of the trajectory to what an origin can be.
func checkOrigin(o *dsecv1.TrajectoryOrigin) error {
	if o == nil {
		return nil
	}
	if _, err := dsec.ParseSandboxID(o.SandboxId); err != nil {
		return at(err, "origin.sandbox_id")
	}
	if len(o.Layer) > maxLabel {
		return dsec.Invalid("origin.layer", "want a digest, got %d bytes", len(o.Layer))
	}
	return nil
}

// checkUser refuses what can be no user of any sandbox. Whether a name is one is
// known when a command starts: until then one that runs as root may make it.
func checkUser(field, user string) error {
	if user == "" {
		return nil
	}
	name, group, grouped := strings.Cut(user, ":")
	if len(user) > maxUser || strings.ContainsAny(user, "\x00\n") || name == "" || grouped && group == "" {
		return dsec.Invalid(field, "want name, uid, name:group or uid:gid in at most %d bytes, got %.64q", maxUser, user)
	}
	for _, id := range []string{name, group} {
		if id == "" || strings.Trim(strings.TrimPrefix(id, "-"), "0123456789") != "" {
			continue // a name
		}
		if n, err := strconv.ParseUint(id, 10, 32); err != nil || n > maxID {
			return dsec.Invalid(field, "want a uid and gid from 0 to %d, got %.64q", maxID, user)
		}
	}
	return nil
}

func checkWorkdir(field, dir string) error {
	if dir == "" {
		return nil
	}
	if !path.IsAbs(dir) || len(dir) >= maxPath || strings.IndexByte(dir, 0) >= 0 {
		return dsec.Invalid(field, "want an absolute path of less than %d bytes without NUL", maxPath)
	}
	return nil
}

// lifetime reads a duration where unset is def and zero is never.
func lifetime(field string, d *durationpb.Duration, def time.Duration) (time.Duration, error) {
	if d == nil {
		return def, nil
	}
	if err := d.CheckValid(); err != nil || d.AsDuration() < 0 || d.AsDuration() > maxDuration {
		return 0, dsec.Invalid(field, "want 0s (never) to %.0fs", maxDuration.Seconds())
	}
	return d.AsDuration(), nil
}

// layerDefaults checks that the layers of a create are there, adds those that they go on, and takes what their images say where the request does not:
// environment from all, user and workdir from the topmost that has one.
func (e *Edge) layerDefaults(ctx context.Context, c *create) error {
	spec, names := c.spec, c.layerNames
	if len(spec.Layers) > dsec.MaxLayers {
		return dsec.Invalid("layers", "want at most %d, got %d", dsec.MaxLayers, len(spec.Layers))
	}
	if len(spec.Layers) == 0 && spec.Kind != dsec.KindFake {
		return dsec.Invalid("layers", "want at least one layer")
	}
	var all []string
	var config layer.Config
	var stack dsec.Stack
	for i, digest := range spec.Layers {
		field := fmt.Sprintf("layers[%d]", i)
		if slices.Contains(all, digest) {
			return dsec.Invalid(field, "%.300q is there already, want each layer once", nameOf(names, i, digest)) // overlayfs takes none twice
		}
		if e.cfg.Layers == nil {
			return &dsec.Error{Code: dsec.CodeNotFound, Field: field, Message: "no layer " + digest}
		}
		meta, err := e.cfg.Layers.Get(ctx, digest)
		if err != nil {
			return at(err, field)
		}
		if err := stack.Add(nameOf(names, i, digest), meta.Kind); err != nil {
			return err
		}
		for _, parent := range meta.Parents {
			if slices.Contains(all, parent) {
				return dsec.Invalid(field, "want layers that go on others than those that are there; %s is", parent)
			}
		}
		all = append(all, meta.Chain()...)
		c.from = append(c.from, slices.Repeat([]int{i}, len(meta.Parents)+1)...)
		config = config.Under(meta.Config)
	}
	if len(all) > dsec.MaxLayers {
		return dsec.Invalid("layers", "want at most %d with those that they go on, got %d", dsec.MaxLayers, len(all))
	}
	spec.Layers = all
	spec.Env = convert.MergeEnv(config.Env, spec.Env)
	spec.User = cmp.Or(spec.User, config.User)
	spec.Workdir = cmp.Or(spec.Workdir, config.Workdir)
	return nil
}

// nameOf is what the creator calls a layer.
func nameOf(names []string, i int, digest string) string {
	if i < len(names) {
		return names[i]
	}
	return digest
}

// ofLayer has an error about one of the layers of spec, as hold and a backend give it,
// name the one of the request that it came with, as the request calls it.
func (c *create) ofLayer(err error) error {
	e, i := asError(err), 0
	if e == nil {
		return err
	}
	if _, serr := fmt.Sscanf(e.Field, "layers[%d]", &i); serr != nil || i >= len(c.from) {
		return err
	}
	named := *e
	named.Field = fmt.Sprintf("layers[%d]", c.from[i])
	named.Message = fmt.Sprintf("%.300q: %s", nameOf(c.layerNames, c.from[i], c.spec.Layers[i]), e.Message)
	return &named
}

// at names the field at fault in err.
func at(err error, field string) error {
	e := asError(err)
	if e == nil {
		return err
	}
	out := *e
	out.Field = field
	return &out
}

// hold takes a reference on each layer of spec, of which more are than were asked for
// where an image became several. The error is of the field of one of them.
func (e *Edge) hold(ctx context.Context, spec *dsec.Spec) (release []func(), err error) {
	for i, digest := range spec.Layers {
		r, err := e.cfg.Layers.Hold(ctx, digest)
		if err != nil {
			releaseAll(release)
			return nil, at(err, fmt.Sprintf("layers[%d]", i))
		}
		release = append(release, r)
	}
	return release, nil
}

func releaseAll(release []func()) {
	for _, r := range release {
		r()
	}
}

// room checks what the node has left.
func (e *Edge) room() error {
	if !e.journal.Reserved() {
		return dsec.Errorf(dsec.CodeExhausted, "the node's disk is full")
	}
	var st unix.Statfs_t
	if err := unix.Statfs(e.cfg.StateDir, &st); err != nil {
		return fmt.Errorf("free space of the state directory: %w", err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < e.cfg.MinFreeBytes {
		return dsec.Errorf(dsec.CodeExhausted, "the node has little disk space left")
	}
	// File systems that make inodes as they need them tell zero of zero.
	if st.Files > 0 && int64(st.Ffree) < e.cfg.MinFreeInodes {
		return dsec.Errorf(dsec.CodeExhausted, "the node has few inodes left")
	}
	return nil
}

// sameBody reports whether a repeated request asks for what s is.
func (s *sandbox) sameBody(c *create) error {
	if !bytes.Equal(s.digest, c.digest) {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "request_id", Message: "used before with another request"}
	}
	return nil
}

var _ Layers = (*layer.Store)(nil)
