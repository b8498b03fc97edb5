package apiserver

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// TestBoundsOfJobs: what one project can have of them is no matter of the others.
func TestBoundsOfJobs(t *testing.T) {
	r := newRig(t)
	r.server.jobs.most = 2
	a, b := r.client(r.secret), r.client(r.other)
	create := func(cl *client.Client, name string) error {
		_, err := cl.CreateJob(t.Context(), name, client.JobOptions{})
		return err
	}
	check(t, create(a, "1"))
	check(t, create(a, "2"))
	if err := create(a, "3"); codeOf(err) != dsec.CodeExhausted {
		t.Errorf("a third one: %v", err)
	}
	check(t, create(a, "2"))
	check(t, create(b, "3"))

	labels := map[string]string{}
	for i := range 16 {
		labels[fmt.Sprintf("%02d", i)] = strings.Repeat("x", maxLabel-2)
	}
	_, err := b.CreateJob(t.Context(), "long", client.JobOptions{Labels: labels})
	check(t, err)
	labels["z"] = ""
	_, err = b.CreateJob(t.Context(), "longer", client.JobOptions{Labels: labels})
	if codeOf(err) != dsec.CodeInvalid {
		t.Errorf("more than %d bytes of labels: %v", maxJobLabelsLen, err)
	}
}
