package apierr

import (
	"testing"

	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

func TestRepeatable(t *testing.T) {
	for procedure, want := range map[string]bool{
		dsecv1connect.SandboxServiceGetProcedure:          true,
		dsecv1connect.SandboxServiceKillProcedure:         true,
		dsecv1connect.EdgeServiceKillSandboxProcedure:     true,
		dsecv1connect.ProcessServiceAttachProcedure:       true,
		dsecv1connect.SandboxServiceCreateProcedure:       false, // only with a request id
		dsecv1connect.EdgeServiceCreateSandboxesProcedure: false,
		dsecv1connect.ProcessServiceExecProcedure:         false,
		dsecv1connect.ProcessServiceStartProcedure:        false,
		dsecv1connect.ProcessServiceWriteStdinProcedure:   false,
		dsecv1connect.SessionServiceRunCommandProcedure:   false,
		dsecv1connect.FileServiceWriteProcedure:           false,
		"/dsec.v1.SandboxService/NoSuch":                  false,
		"/dsec.v1.SandboxService":                         false,
		"":                                                false,
	} {
		if got := Repeatable(procedure); got != want {
			t.Errorf("%q: %v, want %v", procedure, got, want)
		}
	}
}
