package dsec

import (
	"errors"
	"testing"
)

func TestStack(t *testing.T) {
	const b, w, k = LayerBase, LayerWorkspace, LayerToolkit
	for _, tt := range []struct {
		kinds []LayerKind
		field string // of the error; empty for none
		text  string
	}{
		{[]LayerKind{b}, "", ""},
		{[]LayerKind{b, w, k, k}, "", ""},
		{[]LayerKind{b, k, w}, "", ""},
		{[]LayerKind{k}, "layers[0]", `layers[0]: "a" is a toolkit, want a base as the first layer`},
		{[]LayerKind{w, b}, "layers[0]", `layers[0]: "a" is a workspace, want a base as the first layer`},
		{[]LayerKind{b, b}, "layers[1]", `layers[1]: "b" is a base, want a workspace or a toolkit on the base that is layers[0]`},
		{[]LayerKind{b, w, k, w}, "layers[3]", `layers[3]: "d" is a workspace, want at most one; layers[1] is one`},
	} {
		var s Stack
		var err error
		for i, kind := range tt.kinds {
			if err = s.Add(string(rune('a'+i)), kind); err != nil {
				break
			}
		}
		if err == nil {
			if tt.text != "" {
				t.Errorf("%v: no error, want %s", tt.kinds, tt.text)
			}
			continue
		}
		if e, ok := errors.AsType[*Error](err); !ok || e.Code != CodeInvalid || e.Field != tt.field || e.Error() != tt.text {
			t.Errorf("%v: %v, want %s", tt.kinds, err, tt.text)
		}
	}
}
