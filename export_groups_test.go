package taskbox

// Normalise is what an error's message becomes in its fingerprint.
var Normalise = normalise

// Fingerprint is that of a failure of a type with an error.
func Fingerprint(typ string, err error) string {
	d := describe(err, judge(err, nil))
	return fingerprint(typ, d.Class, d.Types, normalise(d.Error), ownFingerprint(err))
}

// GroupsSQL is the statement of Groups, for its plan.
const GroupsSQL = groupsSQL
