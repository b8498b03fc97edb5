package apiserver

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/store"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

const (
	tagPrefix      = "tags/"    // <project>/<name>:<tag>
	droppedPrefix  = "dropped/" // <digest>, for as long as an import may take
	droppedFor     = 24 * time.Hour
	droppingPrefix = "dropping/" // <digest>/<who removes it>, as long as it may be gone a moment later
	droppingFor    = 2 * dropTimeout
)

// tag is the document of one name: a project's word for a layer, with what
// the import told of it.
type tag struct {
	Digest       string    `json:"digest"`
	Parents      []string  `json:"parents,omitempty"` // that it goes on, lowest first
	Kind         string    `json:"kind,omitempty"`    // empty: base
	At           string    `json:"at,omitempty"`      // where its root was put
	Size         int64     `json:"size"`
	Files        int64     `json:"files"`
	Created      time.Time `json:"created"`
	Source       string    `json:"source"`
	SourceDigest string    `json:"source_digest"`
	Origin       *origin   `json:"origin,omitempty"`
	Env          []string  `json:"env,omitempty"`
	User         string    `json:"user,omitempty"`
	Workdir      string    `json:"workdir,omitempty"`
	Entrypoint   []string  `json:"entrypoint,omitempty"`
	Cmd          []string  `json:"cmd,omitempty"`
	Findings     []string  `json:"findings,omitempty"`
}

// chain are the layers that the name keeps, lowest first.
func (t tag) chain() []string { return append(slices.Clone(t.Parents), t.Digest) }

// origin is where an import or a pack came from; At, where the root of a registry's image
// was put, and Entry, that of the packed sandbox's trajectory with which the pack began.
type origin struct {
	Type     string `json:"type"`
	Location string `json:"location"`
	Revision string `json:"revision"`
	At       string `json:"at,omitempty"`
	Entry    uint64 `json:"entry,omitempty"`
}

// layerNames is the index of names. A name belongs to one project; a layer is
// reachable only through a name, so that knowing a digest opens nothing.
type layerNames struct {
	store *store.Store
	tags  *store.Cache[tag]
}

func openLayerNames(ctx context.Context, s *store.Store) (*layerNames, error) {
	tags, err := store.NewCache(ctx, s, tagPrefix, func(_ string, t tag) string { return t.Digest })
	if err != nil {
		return nil, err
	}
	return &layerNames{store: s, tags: tags}, nil
}

func (l *layerNames) close() { l.tags.Close() }

// A name is a path of components as image references have it, and a tag; or an
// image reference as it is, with the port of its host and a digest.
var (
	nameForm   = regexp.MustCompile(`^([a-z0-9]+([.-][a-z0-9]+)*:[0-9]{1,5}/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$`)
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

const maxName = 255

// canonicalName checks a name and adds the tag `latest` where it has none.
func canonicalName(field, name string) (string, error) {
	given := name
	if len(name) <= maxName && !strings.HasPrefix(name, "sha256:") {
		if path := name[strings.LastIndexByte(name, '/')+1:]; !strings.Contains(path, ":") {
			name += ":latest"
		}
		if nameForm.MatchString(name) {
			return name, nil
		}
	}
	return "", dsec.Invalid(field, "want name or name:tag of at most %d characters, the name of lower-case letters and digits with . _ - / between them, got %.300q", maxName, given)
}

// find returns the layer that a caller of project means by ref, a name or a digest.
func (l *layerNames) find(project, field, ref string) (tag, error) {
	missing := &dsec.Error{Code: dsec.CodeNotFound, Field: field, Message: fmt.Sprintf("no layer %.300q; `dsec layer list` shows those that there are", ref)}
	if strings.HasPrefix(ref, "sha256:") {
		if !digestForm.MatchString(ref) {
			return tag{}, dsec.Invalid(field, "want sha256: and 64 hex digits")
		}
		for _, key := range l.tags.Keys(ref) {
			if strings.HasPrefix(key, project+"/") {
				if t, ok, err := l.tags.Get(key); err != nil || ok {
					return t, err
				}
			}
		}
		return tag{}, missing
	}
	name, err := canonicalName(field, ref)
	if err != nil {
		return tag{}, err
	}
	t, ok, err := l.tags.Get(project + "/" + name)
	if err != nil {
		return tag{}, err
	}
	if !ok {
		return tag{}, missing
	}
	return t, nil
}

// set names a layer whose import began at store revision began. It fails where
// the layer was dropped since, or is being dropped: the import may have found it
// there and not stored it again. So it does where the name is not as conds say.
func (l *layerNames) set(ctx context.Context, project, name string, t tag, began int64, conds ...store.Cond) error {
	changed := "the same layer was being removed; import it again"
	if len(conds) > 0 {
		changed = "the layer was being removed, or the name given to another, meanwhile; try again"
	}
	for _, digest := range t.chain() {
		conds = append(conds, store.UnchangedSince(droppedPrefix+digest, began), store.NoneBelow(droppingPrefix+digest))
	}
	rev, err := store.PutIf(ctx, l.store, tagPrefix+project+"/"+name, t, conds...)
	if err != nil {
		if dsec.CodeOf(err) == dsec.CodeConflict {
			return dsec.Errorf(dsec.CodeUnavailable, "%s", changed)
		}
		return err
	}
	return l.tags.Wait(ctx, rev)
}

// unchanged holds where a name is what the cache showed at a revision, or is gone.
func unchanged(project, name string, seen int64) store.Cond {
	return store.UnchangedSince(tagPrefix+project+"/"+name, seen)
}

func (l *layerNames) remove(ctx context.Context, project, name string, conds ...store.Cond) error {
	rev, err := l.store.DeleteIf(ctx, tagPrefix+project+"/"+name, conds...)
	if err != nil {
		return err
	}
	return l.tags.Wait(ctx, rev)
}

// removal is one attempt after another to remove a layer, with a mark of its own:
// another's end must not let names be given to what this one may still remove.
type removal struct {
	digest, mark string
}

func newRemoval(digest string) removal {
	return removal{digest, droppingPrefix + digest + "/" + rand.Text()}
}

// dropping reports whether no project has a name for a layer, which it then marks as
// being dropped, until done is called, or for droppingFor. An import that is under way
// either named it before the marks, and is seen here, or sees one of them and fails; so
// does one that begins before done, also where it ends later: it may have found what
// was gone a moment later.
func (l *layerNames) dropping(ctx context.Context, r removal) (unnamed bool, done func(), err error) {
	// One that has a name is left alone, without marks by which an import of it would
	// fail. Whoever takes its last name comes here after that.
	if named, err := l.named(ctx, r.digest); err != nil || named {
		return false, nil, err
	}
	if _, err := store.PutFor(ctx, l.store, r.mark, time.Now().UTC(), droppingFor); err != nil {
		return false, nil, err
	}
	if err := l.dropped(ctx, r.digest); err != nil {
		return false, nil, err
	}
	named, err := l.named(ctx, r.digest)
	if err != nil {
		return false, nil, err
	}
	end := func(removed bool) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
		defer cancel()
		if removed && l.dropped(ctx, r.digest) != nil {
			return // the other mark stays for its time
		}
		_, _ = l.store.Delete(ctx, r.mark) // else it goes by itself
	}
	if named {
		end(false)
		return false, nil, nil
	}
	return true, func() { end(true) }, nil
}

// dropped has imports of a layer that are under way now fail.
func (l *layerNames) dropped(ctx context.Context, digest string) error {
	_, err := store.PutFor(ctx, l.store, droppedPrefix+digest, time.Now().UTC(), droppedFor)
	return err
}

// named reports whether any project has a name for a layer, or for one that goes on it.
func (l *layerNames) named(ctx context.Context, digest string) (bool, error) {
	tags, err := store.List[tag](ctx, l.store, tagPrefix)
	if err != nil {
		return false, err
	}
	for _, t := range tags {
		if slices.Contains(t.chain(), digest) {
			return true, nil
		}
	}
	return false, nil
}

// referred are the layers that some project has a name for, with those that they go on.
func (l *layerNames) referred() map[string]bool {
	found := map[string]bool{}
	l.tags.Range("", func(_ string, t tag) bool {
		for _, digest := range t.chain() {
			found[digest] = true
		}
		return true
	})
	return found
}

// names are those that a project has for a layer, sorted.
func (l *layerNames) names(project, digest string) (names []string) {
	for _, key := range l.tags.Keys(digest) {
		if name, own := strings.CutPrefix(key, project+"/"); own {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func tagOf(l *dsecv1.Layer, findings []string) (tag, error) {
	for _, digest := range append([]string{l.GetDigest()}, l.GetParents()...) {
		if !digestForm.MatchString(digest) {
			return tag{}, fmt.Errorf("edge answered a build with digest %q", digest)
		}
	}
	c := l.GetConfig()
	var from *origin
	if o := l.Origin; o != nil {
		from = &origin{Type: o.Type, Location: o.Location, Revision: o.Revision, Entry: o.Entry}
	}
	return tag{
		Origin: from,
		Digest: l.Digest, Parents: l.Parents, Kind: l.Kind, Size: l.Size, Files: l.Files, Created: l.Created.AsTime(),
		Source: l.Source, SourceDigest: l.SourceDigest,
		Env: c.GetEnv(), User: c.GetUser(), Workdir: c.GetWorkdir(), Entrypoint: c.GetEntrypoint(), Cmd: c.GetCmd(),
		Findings: findings,
	}, nil
}

// originSandbox is the type of what a sandbox has written.
const originSandbox = "sandbox"

// packedFrom is where a layer comes from, for the trajectories of sandboxes that are made of
// it; nil where it is no pack.
func packedFrom(l *dsecv1.Layer) *dsecv1.TrajectoryOrigin {
	o := l.GetOrigin()
	if o.GetType() != originSandbox || o.Entry == 0 {
		return nil
	}
	return &dsecv1.TrajectoryOrigin{SandboxId: o.Location, Seq: o.Entry, Layer: l.Digest}
}

func (t tag) kind() dsec.LayerKind { return dsec.LayerKind(cmp.Or(t.Kind, string(dsec.LayerBase))) }

func (t tag) message(name string) *dsecv1.Layer {
	var from *dsecv1.LayerOrigin
	if o := t.Origin; o != nil {
		from = &dsecv1.LayerOrigin{Type: o.Type, Location: o.Location, Revision: o.Revision, Entry: o.Entry}
	}
	return &dsecv1.Layer{
		Origin: from,
		Name:   name, Digest: t.Digest, Parents: t.Parents, Kind: string(t.kind()), At: t.At, Size: t.Size, Files: t.Files, Created: timestamppb.New(t.Created),
		Source: t.Source, SourceDigest: t.SourceDigest,
		Config: &dsecv1.LayerConfig{Env: t.Env, User: t.User, Workdir: t.Workdir, Entrypoint: t.Entrypoint, Cmd: t.Cmd},
	}
}
