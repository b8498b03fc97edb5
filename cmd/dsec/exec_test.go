package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func TestViewProcess(t *testing.T) {
	for want, p := range map[string]client.ProcessInfo{
		"running":  {ID: 1},
		"exit 3":   {ID: 1, Outcome: &dsec.Outcome{Code: 3}},
		"signal 9": {ID: 1, Outcome: &dsec.Outcome{Signal: 9}},
		"unknown":  {ID: 1, Fault: "the disk was full"},
	} {
		v, state := viewProcess(p)
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if state != want || (v.Outcome == nil) != (p.Outcome == nil) || v.State != map[bool]string{true: "exited", false: want}[p.Outcome != nil] {
			t.Errorf("%s: %s, %s", want, state, text)
		}
		if strings.Contains(string(text), `"fault":"the disk was full"`) != (want == "unknown") {
			t.Errorf("%s: %s", want, text)
		}
	}
}
