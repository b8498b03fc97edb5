package blob

import (
	"context"
	"net/url"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// Driver makes stores of one scheme of URLs.
type Driver struct {
	Scheme string
	// Params are the parameters that a URL may have.
	Params []string
	// Open opens the store. u has no parameter twice, and none but Params. An error
	// about it is of the field "store".
	Open func(ctx context.Context, u *url.URL, c Credentials) (Store, error)
}

// storeField is what errors about a URL name.
const storeField = "store"

// Open opens the store that a URL names with one of the drivers, and wraps it. A
// plain path is a directory: dir:/path.
func Open(ctx context.Context, drivers []Driver, rawURL string, c Credentials, opt Options) (Store, error) {
	d, u, err := find(drivers, rawURL)
	if err != nil {
		return nil, err
	}
	s, err := d.Open(ctx, u, c)
	if err != nil {
		return nil, err
	}
	return Wrap(s, opt), nil
}

// Check reports what is wrong with a URL, as far as that can be told without opening it.
func Check(drivers []Driver, rawURL string) error {
	_, _, err := find(drivers, rawURL)
	return err
}

// find says nothing of what the URL holds: it may be a password.
func find(drivers []Driver, rawURL string) (Driver, *url.URL, error) {
	if strings.HasPrefix(rawURL, "/") {
		rawURL = (&url.URL{Scheme: "dir", Path: rawURL}).String()
	}
	u, err := url.Parse(rawURL)
	if err != nil || strings.ContainsRune(rawURL, 0) {
		return Driver{}, nil, dsec.Invalid(storeField, "is no URL: want %s", schemes(drivers))
	}
	i := slices.IndexFunc(drivers, func(d Driver) bool { return d.Scheme == u.Scheme })
	switch {
	case i < 0:
		return Driver{}, nil, dsec.Invalid(storeField, "want %s", schemes(drivers))
	case u.User != nil:
		return Driver{}, nil, dsec.Invalid(storeField, "has a user in it: keys belong into %s", credentialsField)
	case u.Fragment != "":
		return Driver{}, nil, dsec.Invalid(storeField, "has a # in it")
	}
	params, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Driver{}, nil, dsec.Invalid(storeField, "has parameters that are not name=value")
	}
	for name, values := range params {
		if !slices.Contains(drivers[i].Params, name) {
			return Driver{}, nil, dsec.Invalid(storeField, "has no parameter %.40q: want %s", name, oneOf(drivers[i].Params))
		}
		if len(values) > 1 {
			return Driver{}, nil, dsec.Invalid(storeField, "has the parameter %s twice", name)
		}
	}
	return drivers[i], u, nil
}

func schemes(drivers []Driver) string {
	var names []string
	for _, d := range drivers {
		names = append(names, d.Scheme+":")
	}
	return "a path that begins with /, or a URL of " + strings.Join(names, " or ")
}

func oneOf(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
