package edge

// CrashSteps lists the points at which the crash suite kills the edge: each is
// passed to Config.Crash just before the step is done.
var CrashSteps = []string{
	"create.intent",    // nothing is written
	"create.backend",   // the intent is in the journal
	"create.handle",    // the sandbox runs, its handle is in no journal
	"create.publish",   // the handle is in the journal, nobody was told
	"kill.intent",      // nothing is written
	"kill.destroy",     // the journal says stopping
	"kill.ended",       // all is freed, the journal says stopping
	"fail.intent",      // PID 1 has died, nothing is written
	"fail.destroy",     // the journal says failed, nothing is freed
	"pause.frozen",     // it is frozen, the journal says running
	"resume.intent",    // the journal says running, it is frozen
	"pack.copied",      // there is a copy of the disk that nobody owns but the backend
	"redirect.intent",  // the journal says stopping, and where to
	"cut.kill",         // the journal says that a command was cut off, it goes on
	"recover.instance", // before a sandbox is taken over; once for each
	"recover.sweep",    // before the objects of unclaimed sandboxes go
	"recover.ended",    // they are gone, the journal does not know yet
}
