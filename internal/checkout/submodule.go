package checkout

import (
	"context"
	"fmt"
	"net/url"
	"path"
	"path/filepath"
	"strings"

	"github.com/opendsec/dsec"
)

// submodules checks out what the commit names, each as a repository of its own: what
// git makes of them has references and logs of all that there is upstream.
func (r *repository) submodules(ctx context.Context, deeper int) error {
	tree, err := r.c.output(ctx, r.dir, "ls-tree", "-r", "-z", r.commit)
	if err != nil {
		return err
	}
	var urls map[string]string
	for entry := range strings.SplitSeq(tree, "\x00") {
		about, name, _ := strings.Cut(entry, "\t")
		fields := strings.Fields(about)
		if len(fields) != 3 || fields[0] != "160000" {
			continue
		}
		if deeper == 0 {
			return dsec.Invalid("submodules", "they lie in each other more than %d deep", maxSubmodules)
		}
		if urls == nil {
			if urls, err = r.urls(ctx); err != nil {
				return err
			}
		}
		from, ok := urls[name]
		if !ok {
			return dsec.Invalid("submodules", "the commit has no URL for %.200q", name)
		}
		if from, err = relative(r.from, from); err != nil {
			return dsec.Invalid("submodules", "%.200q: %v", name, err)
		}
		dir := filepath.Join(r.dir, filepath.FromSlash(name))
		if real, err := filepath.EvalSymlinks(dir); err != nil || !within(r.dir, dir) || !same(r.dir, name, real) {
			return dsec.Invalid("submodules", "%.200q is not in the checkout", name)
		}
		sub := repository{c: r.c, dir: dir, from: from, commit: fields[2], sub: true}
		if err := sub.make(ctx, deeper-1); err != nil {
			return err
		}
	}
	return nil
}

func within(root, dir string) bool {
	rel, err := filepath.Rel(root, dir)
	return err == nil && rel != "." && filepath.IsLocal(rel)
}

// same reports whether a name below root is no link, nor below one.
func same(root, name, real string) bool {
	top, err := filepath.EvalSymlinks(root)
	return err == nil && real == filepath.Join(top, filepath.FromSlash(name))
}

// urls are those of the commit's .gitmodules, by path.
func (r *repository) urls(ctx context.Context) (map[string]string, error) {
	out, err := r.c.output(ctx, r.dir, "config", "--blob", r.commit+":.gitmodules", "-z", "--get-regexp", `^submodule\..*\.(path|url)$`)
	if err != nil {
		return nil, dsec.Invalid("submodules", "the commit has no .gitmodules that can be read")
	}
	paths, urls, byPath := map[string]string{}, map[string]string{}, map[string]string{}
	for entry := range strings.SplitSeq(out, "\x00") {
		key, value, _ := strings.Cut(entry, "\n")
		if name, ok := strings.CutSuffix(key, ".path"); ok {
			paths[name] = value
		} else if name, ok := strings.CutSuffix(key, ".url"); ok {
			urls[name] = value
		}
	}
	for name, p := range paths {
		if u := urls[name]; u != "" {
			byPath[p] = u
		}
	}
	return byPath, nil
}

// relative resolves a submodule's URL against that of the repository that has it.
func relative(base, ref string) (string, error) {
	if strings.HasPrefix(ref, "-") {
		return "", fmt.Errorf("want a URL that does not begin with a dash")
	}
	if !strings.HasPrefix(ref, "./") && !strings.HasPrefix(ref, "../") {
		return ref, nil
	}
	u, err := url.Parse(base)
	if err == nil && u.Scheme != "" {
		u.Path = path.Join(u.Path, ref)
		return u.String(), nil
	}
	host, dir, ok := strings.Cut(base, ":")
	if !ok {
		return "", fmt.Errorf("%q is relative to what is no URL", ref)
	}
	return host + ":" + path.Join(dir, ref), nil
}
